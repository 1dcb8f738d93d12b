//! Replacing a sharded model's values by those of a file, one parameter after the other.

use std::collections::HashMap;

use burn::module::{ModuleMapper, Param, ParamId};
use burn::tensor::Tensor;

use super::matching::MatchedTensor;
use crate::fully_shard::Fsdp;
use crate::fully_shard::place_shards::PlaceShards;
use crate::module::param_ids;
use crate::module::{FsdpModule, ParamIndex};

/// A parameter that values are loaded into or saved from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ParamTarget {
    /// A sharded or replicated parameter.
    Sharded(ParamIndex),
    /// An ignored parameter or a running statistic, of which each rank has its own values.
    PerRank(ParamId),
}

/// Replaces this rank's part of each target. The function cannot fail, so that a model is loaded
/// completely or not at all.
pub(super) fn load_values<M: FsdpModule>(
    model: &mut Fsdp<M>,
    matched: Vec<(ParamTarget, MatchedTensor)>,
) {
    let ids = param_ids(&model.module);
    let mut loaded = Vec::new();
    let mut values = HashMap::new();
    for (target, tensor) in matched {
        match target {
            ParamTarget::Sharded(index) => {
                loaded.push(index);
                if let Some(id) = ids.get(&index) {
                    values.insert(*id, tensor);
                }
            }
            ParamTarget::PerRank(id) => {
                values.insert(id, tensor);
            }
        }
    }
    // Two passes: all old values are freed first, so that the model is never in memory twice.
    let mut clear = ClearValues { values, in_order: Vec::new() };
    model.module = model.module.clone().map(&mut clear);
    let place = PlaceShards::new(&*model.schedule, &model.module);
    let mut fill = FillValues { values: clear.in_order.into_iter(), place };
    model.module = model.module.clone().map(&mut fill);
    model.schedule.set_loaded(&loaded);
}

/// Replaces the parameters to load by one-element placeholders, and collects the new values in the
/// order of the traversal.
struct ClearValues {
    values: HashMap<ParamId, MatchedTensor>,
    in_order: Vec<Option<MatchedTensor>>,
}

impl ModuleMapper for ClearValues {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // A tied clone has the owner's id and stores a placeholder of another shape; neither it nor
        // an empty shard takes values.
        let fits = |tensor: &&MatchedTensor| {
            tensor.base_shape() == param.lazy_shape() && !tensor.is_empty()
        };
        if self.values.get(&param.id).filter(fits).is_none() {
            self.in_order.push(None);
            return param;
        }
        self.in_order.push(self.values.remove(&param.id));
        let (id, base, mapper) = param.consume();
        let placeholder = Tensor::zeros([1; D], &base.device());
        let placeholder = placeholder.set_require_grad(base.is_require_grad());
        Param::from_mapped_value(id, placeholder, mapper)
    }
}

/// Reads the collected values into the parameters, in the order of the traversal.
struct FillValues<'a> {
    values: std::vec::IntoIter<Option<MatchedTensor>>,
    place: PlaceShards<'a>,
}

impl ModuleMapper for FillValues<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(Some(tensor)) = self.values.next() else { return param };
        let (id, base, mapper) = param.consume();
        let data = tensor.data();
        let (tracked, dtype) = (base.is_require_grad(), data.dtype());
        let base = Tensor::from_data(data, (&base.device(), dtype)).set_require_grad(tracked);
        self.place.map_float(Param::from_mapped_value(id, base, mapper))
    }
}
