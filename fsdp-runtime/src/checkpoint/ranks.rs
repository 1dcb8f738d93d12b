//! The ranks that save or load together, and which of them writes what.

use std::ops::Range;
use std::sync::Arc;

use super::manifest::MeshShape;
use crate::collectives::Op;
use crate::collectives::comm::Communicator;
use crate::collectives::group::Message;
use crate::error::CheckpointError;
use crate::error::{CollectiveError, Error};
use crate::fully_shard::Fsdp;
use crate::launch::Worker;
use crate::layout::Mesh;
use crate::module::ParamIndex;
use crate::param_group::{ParamSpec, Placement};

/// Whole tensors of fewer elements are written by one rank: a piece costs a line of the manifest.
const SPLIT_FROM: usize = 1 << 10;

/// One rank's end of a group that saves or loads together.
#[derive(Clone, Debug)]
pub(crate) struct Ranks {
    pub(crate) mesh: Mesh,
    comm: Arc<Communicator>,
}

impl From<&Worker> for Ranks {
    fn from(worker: &Worker) -> Self {
        Self { mesh: worker.mesh(), comm: worker.comm().clone() }
    }
}

impl<M> From<&Fsdp<M>> for Ranks {
    fn from(model: &Fsdp<M>) -> Self {
        Self { mesh: model.engine.mesh(), comm: model.engine.comm().clone() }
    }
}

impl Ranks {
    /// This rank's number.
    pub(crate) fn index(&self) -> usize {
        self.mesh.rank.index()
    }

    /// Whether this is the rank that names folders and writes manifests.
    pub(crate) fn leads(&self) -> bool {
        self.index() == 0
    }

    /// Every rank's value, in rank order.
    pub(crate) fn exchange<T: Message>(&self, what: &str, value: T) -> Result<Vec<Arc<T>>, Error> {
        let op = Op::new("all_gather", what);
        Ok(self.comm.issue(move |group| group.exchange(&op, value)).wait()?)
    }

    /// An outcome that is an error on every rank where it is one on any: one's own, or the first
    /// rank's that has one.
    pub(crate) fn settle<T>(
        &self,
        what: &str,
        outcome: Result<T, CheckpointError>,
    ) -> Result<T, Error> {
        let message = outcome.as_ref().err().map(ToString::to_string);
        let all = self.exchange(what, message)?;
        let value = outcome?;
        match self.mesh.world.ranks().zip(&all).find(|(_, error)| error.is_some()) {
            None => Ok(value),
            Some((rank, reason)) => Err(CollectiveError::PeerFailed {
                rank,
                reason: reason.as_deref().unwrap_or_default().to_string(),
            }
            .into()),
        }
    }
}

/// How the ranks of a model are arranged.
pub(crate) fn arrangement(mesh: Mesh) -> MeshShape {
    MeshShape { replicate: mesh.replicas().size(), shard: mesh.shard_size().size() }
}

/// The elements of a parameter (or of state of its shape) that this rank writes. Every element is
/// written by exactly one rank, and large whole tensors by all of them together.
pub(crate) fn written(mesh: Mesh, place: ParamIndex, entry: &ParamSpec) -> Range<usize> {
    match &entry.held {
        Placement::Shard(range) => {
            // Every copy holds it; each writes a part.
            share(range.clone(), mesh.replica().index(), mesh.replicas().size())
        }
        Placement::Replicated | Placement::PerRank => written_whole(mesh, place, entry.numel()),
        Placement::TiedTo(_) => 0..0,
    }
}

/// The elements that this rank writes of a tensor that every rank holds whole.
pub(crate) fn written_whole(mesh: Mesh, place: ParamIndex, numel: usize) -> Range<usize> {
    let (rank, world) = (mesh.rank.index(), mesh.world.size());
    if numel >= SPLIT_FROM {
        return share(0..numel, rank, world);
    }
    // One writes it all; in turn, as these are many.
    if (place.unit + place.entry) % world == rank { 0..numel } else { 0..0 }
}

/// The elements that this rank writes of a tensor that one rank of each copy of the model owns, for
/// such a rank.
pub(crate) fn written_owned(mesh: Mesh, numel: usize) -> Range<usize> {
    share(0..numel, mesh.replica().index(), mesh.replicas().size())
}

/// Part `index` of `count` about equal parts.
fn share(range: Range<usize>, index: usize, count: usize) -> Range<usize> {
    let bound =
        |index: usize| range.start + (range.len() as u128 * index as u128 / count as u128) as usize;
    bound(index)..bound(index + 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::WorldSize;

    proptest! {
        #[test]
        fn ranks_write_every_element_of_a_whole_tensor_once(
            numel in prop_oneof![0usize..200, SPLIT_FROM - 2..SPLIT_FROM + 300],
            world in 1usize..20,
            unit in 0usize..5,
            entry in 0usize..5,
        ) {
            let world = WorldSize::new(world).unwrap();
            let mut covered = 0;
            for rank in world.ranks() {
                let range = written_whole(Mesh::new(rank, world), ParamIndex { unit, entry }, numel);
                if !range.is_empty() {
                    prop_assert_eq!(range.start, covered);
                    covered = range.end;
                }
            }
            prop_assert_eq!(covered, numel);
        }
    }
}
