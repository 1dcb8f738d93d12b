//! A sharded model of any type, as saving and loading use it: access to what this rank stores of
//! each parameter.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use burn::module::{ModuleMapper, Param, ParamId};
use burn::tensor::{DType, Device, DispatchTensor, Tensor, TensorData};

use crate::backend::owned_data;
use crate::error::raise;
use crate::fully_shard::Fsdp;
use crate::fully_shard::place_shards::placed;
use crate::module::{FsdpModule, ParamIndex, ParamVisitor, Sharded};
use crate::param_group::plan::{IgnoredParam, Key};
use crate::param_group::{ParamSpec, Placement};
use crate::runtime::schedule::ErasedSchedule;

/// This rank's part of a parameter.
#[derive(Debug)]
pub(super) struct LocalParam {
    pub(super) id: ParamId,
    /// Index of the parameter. That of an ignored parameter has the number of units as its unit.
    pub(super) index: ParamIndex,
    pub(super) dtype: DType,
    pub(super) device: Device,
    /// The shard, or the replicated parameter, or the one-element placeholder of an empty shard. An
    /// ignored parameter is flat, of shape `[numel]`.
    pub(super) base: DispatchTensor,
    /// Whether the parameter requires a gradient.
    pub(super) is_tracked: bool,
    /// Whether this is a running statistic, and so no parameter.
    pub(super) is_buffer: bool,
}

impl LocalParam {
    /// Returns whether this is a parameter that requires no gradient.
    pub(super) fn is_frozen(&self) -> bool {
        !self.is_tracked && !self.is_buffer
    }
}

/// Function that returns the new values of a parameter with the given index, description and dtype.
/// `None` leaves the parameter unchanged, and it does not count as loaded.
pub(super) type NewValues<'a> = dyn FnMut(ParamIndex, &ParamSpec, DType) -> Option<TensorData> + 'a;

/// A sharded model of any type.
pub(super) trait ShardedModel {
    /// Returns the model's schedule.
    fn schedule(&self) -> &Arc<dyn ErasedSchedule>;

    /// Returns the ignored parameters and running statistics: each rank has its own values of them.
    /// In a [`ParamIndex`] they are the entries of a unit after the last.
    fn ignored(&self) -> &[IgnoredParam];

    /// Returns the name and layout of each sharded or replicated parameter in the framework that
    /// the model comes from.
    fn keys(&self) -> &BTreeMap<ParamIndex, Key>;

    /// Calls `f` with each parameter, ignored ones included. Tied parameters are visited once, as
    /// their owner.
    fn for_each_param(&self, f: &mut dyn FnMut(LocalParam));

    /// Replaces the values that this rank stores of the parameters `loaded`, one parameter after
    /// the other. Those with an empty shard here have no new values. All other parameters are
    /// unchanged.
    ///
    /// The parameters `loaded` count as loaded afterwards, those with an empty shard here included,
    /// so `loaded` must be equal on all ranks.
    fn replace_values(&mut self, loaded: &HashSet<ParamIndex>, new_values: &mut NewValues<'_>);

    /// Returns the description of a parameter.
    fn spec(&self, index: ParamIndex) -> &ParamSpec {
        param_spec(&**self.schedule(), self.ignored(), index)
    }
}

fn param_spec<'a>(
    schedule: &'a dyn ErasedSchedule,
    ignored: &'a [IgnoredParam],
    index: ParamIndex,
) -> &'a ParamSpec {
    match schedule.units().get(index.unit) {
        Some(unit) => &unit.params[index.param],
        None => &ignored[index.param].spec,
    }
}

/// Calls `f` with the elements of a parameter's stored tensor, in order, as bytes in host memory.
pub(super) fn with_host_bytes(
    schedule: &dyn ErasedSchedule,
    spec: &ParamSpec,
    base: DispatchTensor,
    f: &mut dyn FnMut(&[u8]),
) {
    if spec.placement == Placement::PerRank {
        // An ignored parameter may have another device and dtype than the model.
        return f(ignored_values(base).as_bytes());
    }
    schedule.with_bytes(base, f);
}

/// Returns the elements of an ignored parameter, in the flat shape that [`LocalParam::base`] has.
pub(super) fn ignored_values(base: DispatchTensor) -> TensorData {
    owned_data(Tensor::<1>::from_dispatch(base).into_data())
}

impl<M: FsdpModule> ShardedModel for Fsdp<M> {
    fn schedule(&self) -> &Arc<dyn ErasedSchedule> {
        &self.schedule
    }

    fn ignored(&self) -> &[IgnoredParam] {
        &self.ignored
    }

    fn keys(&self) -> &BTreeMap<ParamIndex, Key> {
        &self.keys
    }

    fn for_each_param(&self, f: &mut dyn FnMut(LocalParam)) {
        let mut visitor =
            LocalParamVisitor { schedule: &*self.schedule, ignored: &self.ignored, f };
        self.module.visit_params(&mut visitor);
    }

    fn replace_values(&mut self, loaded: &HashSet<ParamIndex>, new_values: &mut NewValues<'_>) {
        self.schedule.begin_change().unwrap_or_else(|error| raise(error));
        let (schedule, ignored) = (self.schedule.clone(), self.ignored.clone());
        let mut indices = HashMap::new();
        self.for_each_param(&mut |param| {
            if loaded.contains(&param.index) {
                indices.entry(param.id).or_insert(param.index);
            }
        });
        let mut mapper = ReplaceValues {
            schedule: &*schedule,
            ignored: &ignored,
            new_values,
            indices,
            loaded: Vec::new(),
        };
        // In place, so that each old shard is freed before the next new one is allocated.
        replace_with::replace_with_or_abort(&mut self.module, |module| module.map(&mut mapper));
        schedule.set_loaded(&mapper.loaded);
    }
}

/// The visitor behind [`ShardedModel::for_each_param`].
struct LocalParamVisitor<'a> {
    schedule: &'a dyn ErasedSchedule,
    ignored: &'a [IgnoredParam],
    f: &'a mut dyn FnMut(LocalParam),
}

impl LocalParamVisitor<'_> {
    fn visit<const D: usize>(&mut self, param: &Param<Tensor<D>>, is_buffer: bool) {
        let index = match Sharded::of(param) {
            Some(sharded) => sharded.index,
            None => {
                let is_param = |ignored: &IgnoredParam| ignored.id == param.id;
                let Some(entry) = self.ignored.iter().position(is_param) else { return };
                ParamIndex { unit: self.schedule.units().len(), param: entry }
            }
        };
        let spec = param_spec(self.schedule, self.ignored, index);
        if matches!(spec.placement, Placement::TiedTo(_)) {
            return;
        }
        let base = param.base();
        let (dtype, device) = (base.dtype(), base.device());
        let is_tracked = base.is_require_grad();
        let base = match spec.placement {
            Placement::PerRank => base.detach().reshape([spec.numel()]).into_dispatch(),
            _ => base.into_dispatch(),
        };
        let id = param.id;
        (self.f)(LocalParam { id, index, dtype, device, base, is_tracked, is_buffer });
    }
}

impl ParamVisitor for LocalParamVisitor<'_> {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.visit(param, false);
    }

    fn buffer<const D: usize>(&mut self, buffer: &Param<Tensor<D>>) {
        self.visit(buffer, true);
    }
}

/// The mapper behind [`ShardedModel::replace_values`].
struct ReplaceValues<'a, 'b> {
    schedule: &'a dyn ErasedSchedule,
    ignored: &'a [IgnoredParam],
    new_values: &'a mut NewValues<'b>,
    /// Index of each parameter to load that was not visited yet, by id.
    indices: HashMap<ParamId, ParamIndex>,
    loaded: Vec<ParamIndex>,
}

impl ModuleMapper for ReplaceValues<'_, '_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // A tied parameter that is a clone of its owner has the owner's id and is visited later.
        let Some(index) = self.indices.remove(&param.id) else { return param };
        let spec = param_spec(self.schedule, self.ignored, index);
        // The placeholder of an empty shard needs no values.
        if spec.range().is_empty() {
            self.loaded.push(index);
            return param;
        }
        let (id, base, mapper) = param.consume();
        let (device, dtype) = (base.device(), base.dtype());
        let tracked = base.is_require_grad();
        let Some(data) = (self.new_values)(index, spec, dtype) else {
            return Param::from_mapped_value(id, base, mapper);
        };
        self.loaded.push(index);
        drop(base);
        let base = Tensor::from_data(data, (&device, dtype)).set_require_grad(tracked);
        let param = Param::from_mapped_value(id, base, mapper);
        // An ignored parameter has no unit.
        if spec.is_sharded() { placed(self.schedule, index, param) } else { param }
    }
}
