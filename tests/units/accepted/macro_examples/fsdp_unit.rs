use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn::tensor::activation::gelu;
use fsdp_runtime::fsdp_unit;

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    #[fsdp(key = "intermediate.dense")]
    up: Linear,
    #[fsdp(key = "output.dense")]
    down: Linear,
}

#[fsdp_unit]
impl Block {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(gelu(self.up.forward(x)))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
pub struct Model {
    blocks: Vec<Block>,
    #[fsdp(unit)]
    head: Linear,
}

#[fsdp_unit(field_units)]
impl Model {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        self.head.forward(x)
    }
}
