//! A group of ranks on whatever engine, and what its ranks tell each other beside tensors.

use std::any::Any;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::local::LocalGroup;
use super::{Op, ProcessGroup, Reduce};
use crate::backend::{Float, ShardBackend};
use crate::error::CollectiveError;
use crate::mesh::{Mesh, Rank, WorldSize};
use crate::slot::Slot;

/// A value that ranks exchange: by reference between threads, as bytes between processes.
pub(crate) trait Message: Any + Send + Sync + Serialize + DeserializeOwned {}

impl<T: Any + Send + Sync + Serialize + DeserializeOwned> Message for T {}

/// This rank's end of a group.
#[derive(Debug)]
pub(crate) enum Group {
    /// Of threads.
    Local(LocalGroup),
}

impl Group {
    /// Its members, by their ranks in the world.
    pub(crate) fn members(&self) -> &[Rank] {
        match self {
            Self::Local(group) => group.members(),
        }
    }

    /// The number of its members.
    pub(crate) fn size(&self) -> usize {
        self.members().len()
    }

    /// This process's rank in the world.
    pub(crate) fn rank(&self) -> Rank {
        match self {
            Self::Local(group) => group.rank(),
        }
    }

    /// Every member's value, in rank order.
    pub(crate) fn exchange<T: Message>(
        &self,
        op: &Op,
        value: T,
    ) -> Result<Vec<Arc<T>>, CollectiveError> {
        match self {
            Self::Local(group) => group.exchange(op, value),
        }
    }

    /// The members that give the same `color`, as a group. Every member calls it.
    pub(crate) fn split(&self, color: usize) -> Result<Self, CollectiveError> {
        match self {
            Self::Local(group) => group.split(color).map(Self::Local),
        }
    }

    /// Ends the whole world with `failure`, unless it has ended already.
    pub(crate) fn fail(&self, failure: CollectiveError) {
        match self {
            Self::Local(group) => group.hub().fail(failure),
        }
    }
}

/// The groups of a mesh.
#[derive(Clone, Debug)]
pub(crate) struct MeshGroups {
    /// Those that share one copy of the parameters.
    pub(crate) shard: Arc<Group>,
    /// Those that hold the same shard of different copies, where there are several.
    pub(crate) replicate: Option<Arc<Group>>,
}

impl MeshGroups {
    /// Splits `world`. Every rank calls it.
    pub(crate) fn new(world: &Arc<Group>, mesh: Mesh) -> Result<Self, CollectiveError> {
        if mesh.replicas().size() == 1 {
            return Ok(Self { shard: world.clone(), replicate: None });
        }
        let shard = Arc::new(world.split(mesh.replica().index())?);
        let replicate = Some(Arc::new(world.split(mesh.shard_rank().index())?));
        Ok(Self { shard, replicate })
    }
}

/// Consecutive blocks of `size` members, as `reshard_after_forward = To(size)` has them.
pub(crate) fn blocks(shard: &Group, mesh: Mesh, size: WorldSize) -> Result<Group, CollectiveError> {
    shard.split(mesh.shard_rank().index() / size.size())
}

impl<B: ShardBackend> ProcessGroup<B> for Group {
    fn all_gather(
        &self,
        op: &Op,
        fragments: Vec<(usize, Float<B>)>,
        slot: &Slot<B>,
    ) -> Result<(), CollectiveError> {
        match self {
            Self::Local(group) => group.all_gather(op, fragments, slot),
        }
    }

    fn all_gather_one(
        &self,
        op: &Op,
        fragment: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        match self {
            Self::Local(group) => ProcessGroup::<B>::all_gather_one(group, op, fragment),
        }
    }

    fn gather(
        &self,
        op: &Op,
        to: usize,
        fragment: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        match self {
            Self::Local(group) => ProcessGroup::<B>::gather(group, op, to, fragment),
        }
    }

    fn reduce_scatter(
        &self,
        op: &Op,
        gradients: Vec<Option<Float<B>>>,
        keep: &[Reduce],
        divisor: usize,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        match self {
            Self::Local(group) => {
                ProcessGroup::<B>::reduce_scatter(group, op, gradients, keep, divisor)
            }
        }
    }

    fn broadcast(&self, op: &Op, tensor: Option<Float<B>>) -> Result<Float<B>, CollectiveError> {
        match self {
            Self::Local(group) => ProcessGroup::<B>::broadcast(group, op, tensor),
        }
    }
}
