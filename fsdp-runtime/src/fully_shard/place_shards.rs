//! The way of new shards to the common buffers of their units, where ranks are threads that share them.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::Tensor;

use super::around_float::AroundFloat;
use super::list_params::list_params;
use crate::module::ParamIndex;
use crate::runtime::schedule::ErasedSchedule;

/// Returns the module with its shards in the common buffers of their units, as far as that is possible
/// (`ScheduleShards::placed`).
pub(crate) fn place_shards<M: Module>(schedule: &dyn ErasedSchedule, module: M) -> M {
    let mut place = PlaceShards::new(schedule, &module);
    if place.found.is_empty() { module } else { module.map(&mut place) }
}

/// Returns a parameter with its shard in the common buffer of its unit, if that is possible.
pub(crate) fn placed<const D: usize>(
    schedule: &dyn ErasedSchedule,
    index: ParamIndex,
    param: Param<Tensor<D>>,
) -> Param<Tensor<D>> {
    let (id, base, mapper) = param.consume();
    let base = match schedule.placed(index, base.clone().into_dispatch()) {
        Some(placed) => Tensor::from_dispatch(placed).set_require_grad(base.is_require_grad()),
        None => base,
    };
    Param::from_mapped_value(id, base, mapper)
}

/// The mapper behind [`place_shards`].
pub(crate) struct PlaceShards<'a> {
    schedule: &'a dyn ErasedSchedule,
    /// The sharded parameters that were not reached yet.
    found: HashMap<ParamId, ParamIndex>,
}

impl<'a> PlaceShards<'a> {
    /// Returns the mapper for a module.
    pub(crate) fn new<M: Module>(schedule: &'a dyn ErasedSchedule, module: &M) -> Self {
        let is_sharded = |index| schedule.spec(index).is_sharded();
        let found = match schedule.places_shards() {
            true => list_params(module, is_sharded),
            false => HashMap::new(),
        };
        Self { schedule, found }
    }
}

impl ModuleMapper for PlaceShards<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.found.remove(&param.id) {
            Some(index) => placed(self.schedule, index, param),
            None => param,
        }
    }
}

/// Moves each shard once another mapper has mapped it, so that one shard at a time is stored twice.
impl AroundFloat for PlaceShards<'_> {
    fn map_with<T: ModuleMapper, const D: usize>(
        &mut self,
        mapper: &mut T,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        self.map_float(mapper.map_float(param))
    }
}
