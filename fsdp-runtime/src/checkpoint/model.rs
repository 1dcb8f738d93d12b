//! A sharded model as saving and loading see it: what this rank holds of each parameter.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{ModuleMapper, Param, ParamId};
use burn::tensor::{DType, Device, DispatchTensor, Tensor, TensorData};

use crate::fully_shard::Fsdp;
use crate::group::{Entry, Held};
use crate::param::{Place, Sharded};
use crate::schedule::Engine;
use crate::unit::{FsdpModule, Walk};

/// A parameter as a rank holds it.
#[derive(Debug)]
pub(crate) struct Holding {
    pub(crate) id: ParamId,
    pub(crate) place: Place,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
    /// The fragment, or the whole parameter, or the placeholder of an empty fragment.
    pub(crate) base: DispatchTensor,
}

/// What goes into a parameter's place, if anything.
pub(crate) type Fill<'a> = dyn FnMut(Place, &Entry, DType) -> Option<TensorData> + 'a;

/// A sharded model, whatever its type.
pub(crate) trait Model {
    /// Its schedule.
    fn engine(&self) -> &Arc<dyn Engine>;
    /// Shows every parameter once, at the place that holds it.
    fn visit(&self, f: &mut dyn FnMut(Holding));
    /// Replaces what this rank holds, one parameter after the other.
    fn fill(&mut self, fill: &mut Fill<'_>);
}

/// The entry of a place.
pub(crate) fn entry(engine: &dyn Engine, place: Place) -> &Entry {
    &engine.units()[place.unit].entries[place.entry]
}

impl<M: FsdpModule> Model for Fsdp<M> {
    fn engine(&self) -> &Arc<dyn Engine> {
        &self.engine
    }

    fn visit(&self, f: &mut dyn FnMut(Holding)) {
        struct Visit<'a> {
            engine: &'a dyn Engine,
            f: &'a mut dyn FnMut(Holding),
        }
        impl Walk for Visit<'_> {
            fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let Some(place) = Sharded::of(param).map(|sharded| sharded.place) else { return };
                if matches!(entry(self.engine, place).held, Held::TiedTo(_)) {
                    return;
                }
                let base = param.base();
                let (dtype, device) = (base.dtype(), base.device());
                let base = base.into_dispatch();
                (self.f)(Holding { id: param.id, place, dtype, device, base });
            }
        }
        self.module.walk(&mut Visit { engine: &*self.engine, f });
    }

    fn fill(&mut self, fill: &mut Fill<'_>) {
        struct Mapper<'a, 'b> {
            engine: &'a dyn Engine,
            fill: &'a mut Fill<'b>,
            places: HashMap<ParamId, Place>,
        }
        impl ModuleMapper for Mapper<'_, '_> {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                // A tied clone comes after its owner, with the same id.
                let Some(place) = self.places.remove(&param.id) else { return param };
                let entry = entry(self.engine, place);
                // The placeholder of an empty fragment stays.
                if entry.range().is_empty() {
                    return param;
                }
                let (id, base, mapper) = param.consume();
                let (device, dtype) = (base.device(), base.dtype());
                let tracked = base.is_require_grad();
                let Some(data) = (self.fill)(place, entry, dtype) else {
                    return Param::from_mapped_value(id, base, mapper);
                };
                drop(base);
                let base = Tensor::from_data(data, (&device, dtype)).set_require_grad(tracked);
                Param::from_mapped_value(id, base, mapper)
            }
        }
        let engine = self.engine.clone();
        let mut places = HashMap::new();
        self.visit(&mut |held| _ = places.entry(held.id).or_insert(held.place));
        let mut mapper = Mapper { engine: &*engine, fill, places };
        // In place, so that each old fragment is freed before the next new one is made.
        replace_with::replace_with_or_abort(&mut self.module, |module| module.map(&mut mapper));
    }
}
