//! Which parameters of a sharded model are frozen, for filters of loads and saves.

use std::collections::HashSet;

use burn::module::{Param, ParamId};
use burn::tensor::Tensor;

use super::load_values::ParamTarget;
use crate::fully_shard::Fsdp;
use crate::module::{FsdpModule, ParamIndex, ParamVisitor, Sharded};

/// The frozen parameters of a model.
#[derive(Debug, Default)]
pub(super) struct FrozenParams {
    sharded: HashSet<ParamIndex>,
    per_rank: HashSet<ParamId>,
}

impl FrozenParams {
    /// Returns the frozen parameters of `model`.
    pub(super) fn of<M: FsdpModule>(model: &Fsdp<M>) -> Self {
        let mut frozen = Self::default();
        model.module.visit_params(&mut frozen);
        frozen
    }

    /// Returns whether a parameter is frozen.
    pub(super) fn contains(&self, target: ParamTarget) -> bool {
        match target {
            ParamTarget::Sharded(index) => self.sharded.contains(&index),
            ParamTarget::PerRank(id) => self.per_rank.contains(&id),
        }
    }
}

impl ParamVisitor for FrozenParams {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.base().is_require_grad() {
            match Sharded::of(param) {
                Some(sharded) => _ = self.sharded.insert(sharded.index),
                None => _ = self.per_rank.insert(param.id),
            }
        }
    }
}
