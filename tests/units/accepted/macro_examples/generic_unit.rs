use burn::module::{Module, ModuleDisplay};
use burn::nn::LayerNorm;
use burn::tensor::Tensor;
use fsdp_runtime::{FsdpModule, fsdp_unit};

pub trait Layer {
    fn apply(&self, x: Tensor<3>) -> Tensor<3>;
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Residual<M: FsdpModule + ModuleDisplay + Layer> {
    inner: M,
    norm: LayerNorm,
}

#[fsdp_unit]
impl<M: FsdpModule + ModuleDisplay + Layer> Residual<M> {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        x.clone() + self.inner.apply(self.norm.forward(x))
    }
}
