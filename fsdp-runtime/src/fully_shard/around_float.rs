//! A mapper around another one, for what is done before and after a float parameter is mapped.

use burn::module::{Flag, ModuleMapper, Param};
use burn::tensor::{Bool, Int, Tensor};

/// Maps float parameters by way of another mapper.
pub(crate) trait AroundFloat {
    /// Maps a parameter with `mapper`, and does what comes before and after that.
    fn map_with<T: ModuleMapper, const D: usize>(
        &mut self,
        mapper: &mut T,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>>;
}

/// A mapper that hands float parameters to `around`, and everything else to `mapper`.
pub(crate) struct Around<'a, T, A> {
    pub(crate) mapper: &'a mut T,
    pub(crate) around: A,
}

impl<T: ModuleMapper, A: AroundFloat> ModuleMapper for Around<'_, T, A> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.mapper.enter_module(name, container_type);
    }

    fn exit_module(&mut self, name: &str, container_type: &str) {
        self.mapper.exit_module(name, container_type);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.around.map_with(self.mapper, param)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.mapper.map_int(param)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.mapper.map_bool(param)
    }

    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        self.mapper.map_flag(flag)
    }
}
