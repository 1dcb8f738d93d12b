//! A group of ranks on whatever engine, and what its ranks tell each other beside tensors.

use std::any::Any;
use std::sync::Arc;

use burn::backend::TensorMetadata;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::local::LocalGroup;
#[cfg(feature = "mpi")]
use super::mpi::MpiGroup;
#[cfg(feature = "nccl")]
use super::nccl::NcclGroup;
use super::{Op, ProcessGroup, Reduce};
use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{Float, ShardBackend};
use crate::error::CollectiveError;
use crate::layout::UnitLayout;
use crate::layout::{Mesh, Rank, WorldSize};

/// A value that ranks exchange: by reference between threads, as bytes between processes.
pub(crate) trait Message: Any + Send + Sync + Serialize + DeserializeOwned {}

impl<T: Any + Send + Sync + Serialize + DeserializeOwned> Message for T {}

/// This rank's end of a group.
#[derive(Debug)]
pub(crate) enum Group {
    /// Of threads.
    Local(LocalGroup),
    /// Of processes.
    #[cfg(feature = "mpi")]
    Mpi(MpiGroup),
    /// Of either, with a GPU each.
    #[cfg(feature = "nccl")]
    Nccl(NcclGroup),
}

/// Runs `$body` on the group of whatever engine.
macro_rules! on_engine {
    ($self:expr, |$group:ident| $body:expr) => {
        match $self {
            Group::Local($group) => $body,
            #[cfg(feature = "mpi")]
            Group::Mpi($group) => $body,
            #[cfg(feature = "nccl")]
            Group::Nccl($group) => $body,
        }
    };
}

impl Group {
    /// The engine's name.
    pub(crate) fn engine(&self) -> &'static str {
        match self {
            Self::Local(_) => "local",
            #[cfg(feature = "mpi")]
            Self::Mpi(_) => "mpi",
            #[cfg(feature = "nccl")]
            Self::Nccl(_) => "nccl",
        }
    }

    /// Its members, by their ranks in the world.
    pub(crate) fn members(&self) -> &[Rank] {
        on_engine!(self, |group| group.members())
    }

    /// The number of its members.
    pub(crate) fn size(&self) -> usize {
        self.members().len()
    }

    /// This process's rank in the world.
    pub(crate) fn rank(&self) -> Rank {
        on_engine!(self, |group| group.rank())
    }

    /// Every member's value, in rank order.
    pub(crate) fn exchange<T: Message>(
        &self,
        op: &Op,
        value: T,
    ) -> Result<Vec<Arc<T>>, CollectiveError> {
        on_engine!(self, |group| group.exchange(op, value))
    }

    /// The members that give the same `color`, as a group. Every member calls it.
    pub(crate) fn split(&self, color: usize) -> Result<Self, CollectiveError> {
        match self {
            Self::Local(group) => group.split(color).map(Self::Local),
            #[cfg(feature = "mpi")]
            Self::Mpi(group) => group.split(color).map(Self::Mpi),
            #[cfg(feature = "nccl")]
            Self::Nccl(group) => group.split(color).map(Self::Nccl),
        }
    }

    /// This rank exchanges nothing any more. Processes wait for each other at the end of a run; of
    /// threads, those of the engine `local` are told.
    pub(crate) fn leave(&self) {
        match self {
            Self::Local(group) => group.leave(),
            #[cfg(any(feature = "mpi", feature = "nccl"))]
            _ => {}
        }
    }

    /// What has ended the world, if anything has.
    #[cfg(any(feature = "mpi", feature = "nccl"))]
    pub(crate) fn failure(&self) -> Option<CollectiveError> {
        on_engine!(self, |group| group.failure())
    }

    /// Ends the whole world with `failure`, unless it has ended already.
    pub(crate) fn fail(&self, failure: CollectiveError) {
        on_engine!(self, |group| group.fail(failure));
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
        device: &B::Device,
        shards: Vec<(usize, Float<B>)>,
        shard_len: usize,
        slot: &Arc<GatherBuffer<B>>,
    ) -> Result<(), CollectiveError> {
        debug_assert!(
            shards.iter().all(|(_, shard)| shard.dtype() == slot.dtype()),
            "a shard is cast before it is sent"
        );
        on_engine!(self, |group| group.all_gather(op, device, shards, shard_len, slot))
    }

    fn all_gather_one(
        &self,
        op: &Op,
        device: &B::Device,
        shard: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        on_engine!(self, |group| ProcessGroup::<B>::all_gather_one(group, op, device, shard))
    }

    fn gather(
        &self,
        op: &Op,
        device: &B::Device,
        to: usize,
        shard: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        on_engine!(self, |group| ProcessGroup::<B>::gather(group, op, device, to, shard))
    }

    fn reduce_scatter(
        &self,
        op: &Op,
        device: &B::Device,
        gradients: Vec<Option<Float<B>>>,
        keep: &[Reduce],
        layout: &UnitLayout,
        divisor: usize,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        on_engine!(self, |group| ProcessGroup::<B>::reduce_scatter(
            group, op, device, gradients, keep, layout, divisor
        ))
    }

    fn broadcast(
        &self,
        op: &Op,
        device: &B::Device,
        tensor: Option<Float<B>>,
    ) -> Result<Float<B>, CollectiveError> {
        on_engine!(self, |group| ProcessGroup::<B>::broadcast(group, op, device, tensor))
    }
}
