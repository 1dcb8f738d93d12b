//! A field of a value that FSDP cannot find tensors in.

use burn::tensor::Tensor;
use fsdp_runtime::UnitValue;

pub struct Cache {
    keys: Vec<Tensor<3>>,
}

#[derive(UnitValue)]
pub struct Output {
    hidden: Tensor<3>,
    cache: Cache,
}

fn main() {}
