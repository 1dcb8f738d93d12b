#[derive(Module, Debug)]
#[fsdp_unit(crate = "crate::training::fsdp")]
pub struct Block {
    up: Linear,
    #[fsdp(unit)]
    down: Linear,
}

#[fsdp_unit(field_units, crate = "crate::training::fsdp")]
impl Block {
    pub fn forward(&self, x: Tensor<3>) -> Output {
        Output(self.down.forward(self.up.forward(x)))
    }
}

#[derive(Module, FsdpModule, Debug)]
#[fsdp(crate = "crate::training::fsdp")]
pub struct Head(Linear);

#[derive(UnitValue)]
#[fsdp(crate = "crate::training::fsdp")]
pub struct Output(Tensor<3>);
