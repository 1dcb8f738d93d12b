//! Puts what a file holds into a sharded model's parameters, one after the other.

use std::collections::HashMap;

use burn::module::{ModuleMapper, Param, ParamId};
use burn::tensor::{Tensor, TensorData};

use super::fit::Part;
use crate::fully_shard::Fsdp;
use crate::module::{FsdpModule, ParamVisitor};
use crate::module::{ParamIndex, Sharded};
use crate::param_group::Placement;

/// Where values go, or come from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    /// A sharded parameter.
    Parameter(ParamIndex),
    /// What each rank has whole for itself: an ignored parameter, or a running mean.
    Local(ParamId),
}

impl<M: FsdpModule> Fsdp<M> {
    /// Replaces what this rank holds of each target. Cannot fail, so that a model is loaded as a
    /// whole or not at all.
    pub(super) fn fill(&mut self, parts: Vec<(Target, Part)>) {
        let mut ids = Ids { fsdp: self, of: HashMap::new() };
        self.module.visit_params(&mut ids);
        let ids = ids.of;
        let mut loaded = Vec::new();
        let mut values = HashMap::new();
        for (target, part) in parts {
            match target {
                Target::Parameter(place) => {
                    loaded.push(place);
                    if let Some(id) = ids.get(&place) {
                        values.insert(*id, part);
                    }
                }
                Target::Local(id) => {
                    values.insert(id, part);
                }
            }
        }
        // First what is there goes, so that the model is never in memory twice.
        let mut clear = Clear { values, parts: Vec::new() };
        self.module = self.module.clone().map(&mut clear);
        self.module = self.module.clone().map(&mut Fill(clear.parts.into_iter()));
        self.engine.set_loaded(&loaded);
    }
}

/// The id of the parameter at each place that holds values.
struct Ids<'a, M> {
    fsdp: &'a Fsdp<M>,
    of: HashMap<ParamIndex, ParamId>,
}

impl<M> ParamVisitor for Ids<'_, M> {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(&Sharded { place, .. }) = Sharded::of(param) else { return };
        let entry = &self.fsdp.engine.units()[place.unit].entries[place.entry];
        if !matches!(entry.held, Placement::TiedTo(_)) {
            self.of.insert(place, param.id);
        }
    }
}

/// Drops the values of the parameters to load, and notes what goes where in the traversal's order.
struct Clear {
    values: HashMap<ParamId, Part>,
    parts: Vec<Option<Part>>,
}

impl ModuleMapper for Clear {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // A tied clone has its owner's id and holds one element in its place; so does a rank that
        // holds nothing of the parameter.
        let fits = |part: &&Part| part.base_shape() == param.lazy_shape() && !part.is_empty();
        if self.values.get(&param.id).filter(fits).is_none() {
            self.parts.push(None);
            return param;
        }
        self.parts.push(self.values.remove(&param.id));
        let (id, base, mapper) = param.consume();
        let nothing = Tensor::zeros([1; D], &base.device());
        let nothing = nothing.set_require_grad(base.is_require_grad());
        Param::from_mapped_value(id, nothing, mapper)
    }
}

struct Fill(std::vec::IntoIter<Option<Part>>);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(Some(part)) = self.0.next() else { return param };
        let (id, base, mapper) = param.consume();
        let data = TensorData::new(part.read(), part.base_shape());
        let tracked = base.is_require_grad();
        let base = Tensor::from_data(data, &base.device()).set_require_grad(tracked);
        Param::from_mapped_value(id, base, mapper)
    }
}
