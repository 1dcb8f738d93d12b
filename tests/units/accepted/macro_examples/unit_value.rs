use burn::tensor::Tensor;
use fsdp_runtime::UnitValue;

#[derive(UnitValue)]
pub struct Output {
    pub hidden: Tensor<3>,
    pub pooled: Option<Tensor<2>>,
}
