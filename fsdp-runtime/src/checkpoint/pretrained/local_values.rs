//! This rank's part of each parameter, as input of the gathers of a save.

use std::collections::HashMap;

use burn::module::ParamId;
use burn::tensor::{DispatchTensor, TensorData};

use crate::checkpoint::sharded_model::{ShardedModel, ignored_values};
use crate::layout::Rank;
use crate::module::ParamIndex;
use crate::param_group::Placement;

/// This rank's part of each parameter.
#[derive(Default)]
pub(super) struct LocalValues {
    /// Shard or replicated parameter of each parameter that is not tied to another.
    pub(super) sharded: HashMap<ParamIndex, DispatchTensor>,
    /// Values of ignored parameters and running statistics, flat and in f32. Only rank 0's are
    /// saved, so that other ranks have none here.
    pub(super) per_rank: HashMap<ParamId, TensorData>,
}

impl LocalValues {
    /// Returns the values of `model` that this rank stores.
    pub(super) fn of(model: &dyn ShardedModel) -> Self {
        let mut values = Self::default();
        let saves = model.schedule().world_mesh().rank == Rank::ZERO;
        model.for_each_param(&mut |param| match model.spec(param.index).placement {
            Placement::PerRank if saves => {
                let data = ignored_values(param.base).convert::<f32>();
                values.per_rank.insert(param.id, data);
            }
            Placement::PerRank => {}
            _ => _ = values.sharded.insert(param.index, param.base),
        });
        values
    }
}
