//! A sharded model as saving and loading see it: what this rank holds of each parameter.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn::module::{ModuleMapper, Param, ParamId};
use burn::tensor::{DType, Device, DispatchTensor, Tensor, TensorData};

use crate::fully_shard::Fsdp;
use crate::module::{FsdpModule, ParamVisitor};
use crate::module::{ParamIndex, Sharded};
use crate::param_group::plan::{IgnoredParam, Key};
use crate::param_group::{ParamSpec, Placement};
use crate::runtime::schedule::Engine;

/// A parameter as a rank holds it.
#[derive(Debug)]
pub(crate) struct Holding {
    pub(crate) id: ParamId,
    pub(crate) place: ParamIndex,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
    /// The shard, or the whole parameter, or the placeholder of an empty shard.
    pub(crate) base: DispatchTensor,
}

/// What goes into a parameter's place, if anything.
pub(crate) type Fill<'a> = dyn FnMut(ParamIndex, &ParamSpec, DType) -> Option<TensorData> + 'a;

/// A sharded model, whatever its type.
pub(crate) trait Model {
    /// Its schedule.
    fn engine(&self) -> &Arc<dyn Engine>;
    /// What each rank has whole for itself. Their places are those of a unit beyond the last.
    fn ignored(&self) -> &[IgnoredParam];
    /// The names of parameters in the framework they come from.
    fn keys(&self) -> &BTreeMap<ParamIndex, Key>;
    /// Shows every parameter once, at the place that holds it.
    fn visit(&self, f: &mut dyn FnMut(Holding));
    /// Replaces what this rank holds, one parameter after the other. What `fill` gave, and what this
    /// rank holds nothing of, counts as loaded from then on.
    fn fill(&mut self, fill: &mut Fill<'_>);
}

impl dyn Model + '_ {
    /// The entry of a place.
    pub(crate) fn entry(&self, place: ParamIndex) -> &ParamSpec {
        entry(&**self.engine(), self.ignored(), place)
    }
}

/// The entry of a place.
pub(crate) fn entry<'a>(
    engine: &'a dyn Engine,
    ignored: &'a [IgnoredParam],
    place: ParamIndex,
) -> &'a ParamSpec {
    match engine.units().get(place.unit) {
        Some(unit) => &unit.entries[place.entry],
        None => &ignored[place.entry].entry,
    }
}

/// Shows the elements of what a rank holds, in order, as bytes of the host.
pub(crate) fn with_bytes(
    engine: &dyn Engine,
    entry: &ParamSpec,
    base: DispatchTensor,
    f: &mut dyn FnMut(&[u8]),
) {
    if entry.held == Placement::PerRank {
        // It may be of another device or dtype than the model's.
        return f(own(base).as_bytes());
    }
    engine.with_bytes(base, f);
}

/// The elements of an ignored parameter, which is shown flat.
pub(crate) fn own(base: DispatchTensor) -> TensorData {
    Tensor::<1>::from_dispatch(base).into_data()
}

impl<M: FsdpModule> Model for Fsdp<M> {
    fn engine(&self) -> &Arc<dyn Engine> {
        &self.engine
    }

    fn ignored(&self) -> &[IgnoredParam] {
        &self.ignored
    }

    fn keys(&self) -> &BTreeMap<ParamIndex, Key> {
        &self.keys
    }

    fn visit(&self, f: &mut dyn FnMut(Holding)) {
        struct Visit<'a> {
            engine: &'a dyn Engine,
            ignored: &'a [IgnoredParam],
            f: &'a mut dyn FnMut(Holding),
        }
        impl ParamVisitor for Visit<'_> {
            fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let place = match Sharded::of(param) {
                    Some(sharded) => sharded.place,
                    None => {
                        let is = |ignored: &IgnoredParam| ignored.id == param.id;
                        let Some(entry) = self.ignored.iter().position(is) else { return };
                        ParamIndex { unit: self.engine.units().len(), entry }
                    }
                };
                let entry = entry(self.engine, self.ignored, place);
                if matches!(entry.held, Placement::TiedTo(_)) {
                    return;
                }
                let base = param.base();
                let (dtype, device) = (base.dtype(), base.device());
                let base = match entry.held {
                    Placement::PerRank => base.detach().reshape([entry.numel()]).into_dispatch(),
                    _ => base.into_dispatch(),
                };
                (self.f)(Holding { id: param.id, place, dtype, device, base });
            }

            fn buffer<const D: usize>(&mut self, buffer: &Param<Tensor<D>>) {
                self.param(buffer);
            }
        }
        self.module.visit_params(&mut Visit { engine: &*self.engine, ignored: &self.ignored, f });
    }

    fn fill(&mut self, fill: &mut Fill<'_>) {
        struct Mapper<'a, 'b> {
            engine: &'a dyn Engine,
            ignored: &'a [IgnoredParam],
            fill: &'a mut Fill<'b>,
            places: HashMap<ParamId, ParamIndex>,
            loaded: Vec<ParamIndex>,
        }
        impl ModuleMapper for Mapper<'_, '_> {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                // A tied clone comes after its owner, with the same id.
                let Some(place) = self.places.remove(&param.id) else { return param };
                let entry = entry(self.engine, self.ignored, place);
                // The placeholder of an empty shard stays.
                if entry.range().is_empty() {
                    self.loaded.push(place);
                    return param;
                }
                let (id, base, mapper) = param.consume();
                let (device, dtype) = (base.device(), base.dtype());
                let tracked = base.is_require_grad();
                let Some(data) = (self.fill)(place, entry, dtype) else {
                    return Param::from_mapped_value(id, base, mapper);
                };
                self.loaded.push(place);
                drop(base);
                let base = Tensor::from_data(data, (&device, dtype)).set_require_grad(tracked);
                Param::from_mapped_value(id, base, mapper)
            }
        }
        let (engine, ignored) = (self.engine.clone(), self.ignored.clone());
        let mut places = HashMap::new();
        self.visit(&mut |held| _ = places.entry(held.id).or_insert(held.place));
        let mut mapper =
            Mapper { engine: &*engine, ignored: &ignored, fill, places, loaded: Vec::new() };
        // In place, so that each old shard is freed before the next new one is made.
        replace_with::replace_with_or_abort(&mut self.module, |module| module.map(&mut mapper));
        engine.set_loaded(&mapper.loaded);
    }
}
