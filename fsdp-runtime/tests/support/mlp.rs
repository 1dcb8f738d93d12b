//! A stack of residual blocks of any width: the toy model of the tests and benchmarks that need no
//! other.
#![allow(dead_code, reason = "each user takes its part")]

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use fsdp_runtime::prelude::*;

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    pub up: Linear,
    pub down: Linear,
}

#[fsdp_unit]
impl Block {
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.clone() + self.down.forward(relu(self.up.forward(x)))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
pub struct Mlp {
    pub blocks: Vec<Block>,
    pub head: Linear,
}

#[fsdp_unit]
impl Mlp {
    /// `[rows, width]` to `[rows, outputs]`.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        self.head.forward(x)
    }
}

/// The sizes of a model.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub blocks: usize,
    /// Elements of a row between blocks.
    pub width: usize,
    /// Elements of a row between the two matrices of a block.
    pub hidden: usize,
    /// Elements of a row of the output.
    pub outputs: usize,
}

impl Sizes {
    pub fn block(&self, device: &Device) -> Block {
        Block {
            up: LinearConfig::new(self.width, self.hidden).init(device),
            down: LinearConfig::new(self.hidden, self.width).init(device),
        }
    }

    pub fn init(&self, device: &Device) -> Mlp {
        Mlp {
            blocks: (0..self.blocks).map(|_| self.block(device)).collect(),
            head: LinearConfig::new(self.width, self.outputs).init(device),
        }
    }
}

/// Returns the mean square.
pub fn loss(output: Tensor<2>) -> Tensor<1> {
    output.powf_scalar(2.0).mean()
}
