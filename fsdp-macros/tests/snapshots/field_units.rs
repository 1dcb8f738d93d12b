#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    up: Linear,
    #[fsdp(unit, key = "output.dense")]
    down: Linear,
    #[fsdp(unit, leaf)]
    gates: Vec<Gate>,
}

#[fsdp_unit(field_units)]
impl Block {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        x.clone() + self.down.forward(gelu(self.up.forward(x)))
    }

    fn gate(&self, x: Tensor<3>) -> Option<Tensor<3>> {
        Some(self.gates.first()?.forward(x, None))
    }

    fn pass<T: Into<Tensor<3>> + UnitValue>(&self, x: T, y: T) -> Tensor<3> {
        let y = y.into();
        self.down.forward(x) + self.down.forward(y)
    }

    fn width(&self) -> usize {
        self.width
    }
}
