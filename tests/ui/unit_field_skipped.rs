//! `#[fsdp(unit)]` on fields that hold nothing to gather, and twice on one.

use burn::module::{Module, Param};
use burn::nn::{Dropout, Linear};
use burn::tensor::Tensor;
use fsdp_runtime::FsdpModule;

#[derive(Module, FsdpModule, Debug)]
pub struct Skipped {
    #[module(skip)]
    #[fsdp(unit)]
    cache: Option<Linear>,
    #[fsdp(unit)]
    width: usize,
    #[fsdp(unit, unit)]
    twice: Linear,
    #[fsdp(unit)]
    value: Linear,
    #[fsdp(units)]
    misspelt: Linear,
}

#[derive(Module, FsdpModule, Debug)]
#[fsdp(unit)]
pub struct Empty {
    weight: Param<Tensor<2>>,
}

#[derive(Module, FsdpModule, Debug)]
pub struct Nothing {
    #[fsdp(unit)]
    dropout: Dropout,
    #[fsdp(unit)]
    weight: Param<Tensor<2>>,
}

fn main() {}
