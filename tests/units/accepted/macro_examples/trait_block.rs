use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use fsdp_runtime::fsdp_unit;

pub trait Encoder {
    fn encode(&self, x: Tensor<3>) -> Tensor<3>;
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Head {
    dense: Linear,
}

#[fsdp_unit]
impl Head {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.dense.forward(x)
    }
}

#[fsdp_unit(more)]
impl Encoder for Head {
    #[fsdp(forward)]
    fn encode(&self, x: Tensor<3>) -> Tensor<3> {
        self.dense.forward(x).detach()
    }
}
