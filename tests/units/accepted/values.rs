//! Structs and enums of tensors as inputs and outputs of a unit.
#![deny(warnings)]

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use fsdp_runtime::{UnitValue, fsdp_unit};

#[derive(UnitValue)]
pub struct Output<T> {
    pub hidden: Tensor<3>,
    pub pooled: Option<T>,
    pub steps: usize,
}

#[derive(UnitValue)]
pub struct Pair(pub Tensor<3>, pub Vec<Tensor<2>>);

#[derive(UnitValue)]
pub enum Step {
    Done,
    Next(Pair),
    Both { output: Output<Tensor<2>>, pair: Pair },
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    up: Linear,
}

#[fsdp_unit]
impl Block {
    pub fn forward(&self, step: Step) -> Result<Output<Tensor<2>>, String> {
        match step {
            Step::Done => Err("done".to_string()),
            Step::Next(Pair(hidden, mut pooled)) => {
                let hidden = self.up.forward(hidden);
                Ok(Output { hidden, pooled: pooled.pop(), steps: 1 })
            }
            Step::Both { output, pair: _ } => Ok(output),
        }
    }
}
