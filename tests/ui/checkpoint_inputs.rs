//! Units under `checkpoint` whose forwards cannot be recomputed from their inputs.

use burn::module::Module;
use burn::nn::{Linear, RotaryEncoding};
use burn::tensor::Tensor;
use fsdp_runtime::fsdp_unit;

pub struct Cache {
    keys: Vec<Tensor<3>>,
}

#[derive(Module, Debug)]
#[fsdp_unit(checkpoint)]
pub struct Block {
    up: Linear,
}

#[fsdp_unit]
impl Block {
    pub fn forward(&self, x: Tensor<3>, mask: &mut Tensor<3>) -> Tensor<3> {
        self.up.forward(x) * mask.clone()
    }

    pub fn forward_some(&self, x: Tensor<3>, masks: &[Tensor<3>]) -> Tensor<3> {
        self.up.forward(x) * masks[0].clone()
    }

    pub fn forward_reading(&self, x: Tensor<3>, cache: &Cache) -> Tensor<3> {
        self.up.forward(x + cache.keys[0].clone())
    }

    pub fn forward_shared(&self, x: Tensor<3>, shared: &Linear) -> Tensor<3> {
        shared.forward(self.up.forward(x))
    }

    pub fn forward_cached(&self, x: Tensor<3>, cache: Cache) -> Tensor<3> {
        self.up.forward(x + cache.keys[0].clone())
    }

    pub fn forward_with(&self, x: Tensor<3>, f: impl Fn(Tensor<3>) -> Tensor<3>) -> Tensor<3> {
        f(self.up.forward(x))
    }

    pub fn forward_any<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.up.forward(x)
    }

    pub fn forward_named(&self, x: Tensor<3>) -> (Tensor<3>, &str) {
        (self.up.forward(x), "up")
    }

    /// Nothing is wrong with this one, nor with the next.
    pub fn forward_tables(&self, x: Tensor<3>, rope: &RotaryEncoding, mask: &Tensor<3>) -> Tensor<3> {
        self.up.forward(rope.forward(x)) * mask.clone()
    }

    pub fn forward_step(&self, (x, scale): (Tensor<3>, f64), mask: Option<Tensor<3>>) -> Tensor<3> {
        let x = self.up.forward(x) * scale;
        match mask {
            Some(mask) => x * mask,
            None => x,
        }
    }
}

fn main() {}
