#[derive(Module, Debug)]
#[fsdp_unit(checkpoint)]
pub struct Block {
    up: Linear,
}

#[fsdp_unit]
impl Block {
    pub fn forward(&self, (x, scale): (Tensor<3>, f64), mask: Option<Tensor<3>>) -> Tensor<3> {
        self.up.forward(x) * scale + mask.unwrap_or_default()
    }

    pub fn forward_tables(&self, x: Tensor<3>, tables: &Tables) -> Tensor<3> {
        self.up.forward(x) + tables.offset.clone()
    }

    pub fn forward_named(&self, x: Tensor<3>, tables: &Tables) -> (Tensor<3>, &str) {
        (self.up.forward(x) + tables.offset.clone(), "up")
    }

    #[cfg(feature = "generation")]
    pub unsafe fn forward_step(&self) -> Output {
        Output
    }

    pub fn forward_cached(&self, x: Tensor<3>, cache: &mut Cache<'_>) -> Tensor<3> {
        cache.push(self.up.forward(x))
    }

    pub fn forward_any<const N: usize>(&self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }
}
