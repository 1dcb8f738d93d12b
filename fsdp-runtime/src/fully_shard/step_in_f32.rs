//! The copies in f32 that an optimizer steps in place of parameters that are stored in bf16, and the reports
//! of the optimizer's state.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::Tensor;
use fsdp_kernels::batched_steps;

use super::around_float::AroundFloat;
use super::list_params::list_params;
use crate::module::{ParamIndex, with_autodiff_of};
use crate::param_group::ParamSpec;
use crate::param_group::memory::{OptimizerStates, reported};
use crate::runtime::schedule::ErasedSchedule;

/// What makes parameters in bf16 look to the mapper of an optimizer as if they were in f32. Only one of
/// them exists in f32 at a time. What the optimizer returns is rounded at random.
pub(crate) struct StepInF32<'a> {
    schedule: &'a dyn ErasedSchedule,
    states: &'a OptimizerStates,
    /// The parameters that are stepped in a copy. One that is tied to another has the other's id, and
    /// comes later.
    rounded: HashMap<ParamId, ParamIndex>,
}

impl<'a> StepInF32<'a> {
    /// Returns the value for a module, or for the replicated parameters of it only.
    pub(crate) fn new<M: Module>(
        schedule: &'a dyn ErasedSchedule,
        states: &'a OptimizerStates,
        module: &M,
        only_replicated: bool,
    ) -> Self {
        let units = schedule.units();
        let is_rounded = |index: ParamIndex| {
            let spec = &units[index.unit].params[index.param];
            let left = only_replicated && spec.is_sharded();
            // The placeholder of an empty shard has no gradient.
            spec.is_rounded() && !left && !spec.range().is_empty()
        };
        let rounded = match units.iter().flat_map(|unit| &unit.params).any(ParamSpec::is_rounded) {
            true => list_params(module, is_rounded),
            false => HashMap::new(),
        };
        Self { schedule, states, rounded }
    }
}

impl StepInF32<'_> {
    /// Steps a parameter, and records what the optimizer reports of its state.
    fn step<T: ModuleMapper, const D: usize>(
        &self,
        mapper: &mut T,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        let id = param.id;
        let (param, bytes) = reported(|| mapper.map_float(param));
        self.states.set(id, bytes);
        param
    }
}

impl AroundFloat for StepInF32<'_> {
    fn map_with<T: ModuleMapper, const D: usize>(
        &mut self,
        mapper: &mut T,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        let Some(index) = self.rounded.remove(&param.id) else {
            return self.step(mapper, param);
        };
        let _copy = self.schedule.count_step_copy(index);
        let (id, base, value_mapper) = param.consume();
        let plain = if base.is_autodiff() { base.clone().inner() } else { base.clone() };
        let wide = Tensor::from_dispatch(self.schedule.widened(plain.into_dispatch()));
        let wide = with_autodiff_of(&base, wide);
        drop(base);
        let param = Param::from_mapped_value(id, wide, value_mapper);
        // A step that shares a launch with others would run only after the rounding.
        let param = batched_steps::scope(|| self.step(mapper, param));
        let (id, stepped, value_mapper) = param.consume();
        let plain = if stepped.is_autodiff() { stepped.clone().inner() } else { stepped.clone() };
        let rounded = self.schedule.rounded(index, plain.into_dispatch());
        let rounded = with_autodiff_of(&stepped, Tensor::from_dispatch(rounded));
        Param::from_mapped_value(id, rounded, value_mapper)
    }
}
