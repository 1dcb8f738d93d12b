//! Generic units whose parameters lack the bound that they need, or that no module has.

use burn::module::{Module, ModuleDisplay};
use burn::nn::Linear;
use fsdp_runtime::{FsdpModule, fsdp_unit};

pub trait Backend {}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Residual<M: Module + ModuleDisplay> {
    inner: Vec<M>,
    up: Linear,
}

#[derive(Module, FsdpModule, Debug)]
pub struct Wrapper<M>
where
    M: Module + ModuleDisplay,
{
    inner: M,
}

#[derive(Debug, Clone)]
#[fsdp_unit]
pub struct Old<B: Backend> {
    up: Linear,
    backend: core::marker::PhantomData<B>,
}

#[derive(Debug, Clone)]
#[fsdp_unit]
pub struct Borrowed<'a> {
    up: &'a Linear,
}

fn main() {}
