//! The layout in which a rank stores a model, to which a local state is bound.

use std::ops::Range;

use crate::checkpoint::sharded_model::ShardedModel;
use crate::error::CheckpointError;
use crate::layout::StorageType;
use crate::param_group::ParamSpec;

/// Path, full shape, stored range of elements and form of storage of each parameter on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LocalLayout {
    rank: usize,
    world: usize,
    params: Vec<(String, Vec<usize>, Range<usize>, StorageType)>,
}

impl LocalLayout {
    /// Returns the layout of `model` on this rank.
    pub(super) fn of(model: &dyn ShardedModel) -> Self {
        let (units, mesh) = (model.schedule().units(), model.schedule().mesh());
        let specs = units.iter().flat_map(|unit| &unit.params);
        let specs = specs.chain(model.ignored().iter().map(|ignored| &ignored.spec));
        let param =
            |spec: &ParamSpec| (spec.path.clone(), spec.shape.clone(), spec.range(), spec.storage);
        Self {
            rank: mesh.rank.index(),
            world: mesh.world.size(),
            params: specs.map(param).collect(),
        }
    }

    /// Checks that this layout, that of a state, is equal to a model's.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StateMismatch`] with every difference.
    pub(super) fn check(&self, model: &Self) -> Result<(), CheckpointError> {
        let mut differences: Vec<String> = difference("world size", &self.world, &model.world)
            .into_iter()
            .chain(difference("rank", &self.rank, &model.rank))
            .collect();
        for at in 0..self.params.len().max(model.params.len()) {
            let (found, expected) = (self.params.get(at), model.params.get(at));
            differences.extend(difference("parameter", &found, &expected));
        }
        if differences.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::StateMismatch { differences })
    }
}

/// Describes the difference between a value of a state and the model's, if they differ. `what`
/// names the value.
pub(super) fn difference<T: PartialEq + std::fmt::Debug>(
    what: &str,
    found: &T,
    expected: &T,
) -> Option<String> {
    (found != expected).then(|| format!("{what} {found:?} in the state, {expected:?} in the model"))
}
