#[fsdp_unit]
impl Block {
    /// Builds the block.
    pub fn new(config: &BlockConfig) -> Self {
        config.init()
    }

    /// Attends to `x`, then transforms it.
    pub fn forward(&self, x: Tensor<3>, mask: Option<Tensor<4, Bool>>) -> Tensor<3> {
        let x = self.attention.forward(x, mask);
        self.down.forward(gelu(self.up.forward(x)))
    }

    /// One step of generation.
    #[expect(clippy::too_many_arguments)]
    pub(crate) fn forward_step<'a, const D: usize, T: Into<Tensor<D>> + UnitValue>(
        &self,
        (query, _): (Tensor<3>, usize),
        mut cache: Cache,
        keys: &'a mut Keys,
        other: T,
    ) -> Result<&'a Tensor<3>, CacheError>
    where
        T: Clone,
    {
        cache.check()?;
        if cache.is_full() {
            return Err(CacheError::Full);
        }
        keys.push(query, other.into())
    }

    /// Inputs of generic types, and inputs of which no caller makes a `UnitValue`.
    fn forward_mapped<T, F>(
        &self,
        first: Option<T>,
        second: impl Into<Tensor<3>> + UnitValue,
        last: &T,
        map: F,
        done: Box<dyn FnOnce(T)>,
    ) -> Tensor<3>
    where
        T: UnitValue,
        F: FnMut(T) -> Tensor<3>,
    {
        done(last.clone());
        first.map_or(second.into(), map)
    }

    fn project(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(x)
    }
}
