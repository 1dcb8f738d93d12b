//! A process group of any engine, and the process groups of a mesh.

use std::sync::Arc;

use burn::backend::TensorMetadata;

pub(crate) use super::local::Fenced;
use super::local::LocalGroup;
pub(crate) use super::message::Message;
#[cfg(feature = "mpi")]
use super::mpi::MpiGroup;
#[cfg(feature = "nccl")]
use super::nccl::NcclGroup;
use super::op::Op;
use super::process_group::{ProcessGroup, ReduceScatter};
use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{Float, ShardBackend, numel};
use crate::error::CollectiveError;
use crate::layout::{Mesh, Rank, WorldSize};

/// A process group of any engine, as one rank sees it.
///
/// Its own methods exchange values in host memory. Its implementation of [`ProcessGroup`] has the
/// collectives on tensors.
#[derive(Debug)]
pub(crate) enum AnyProcessGroup {
    /// Ranks are threads of this process.
    Local(LocalGroup),
    /// Ranks are processes, started by `mpirun`.
    #[cfg(feature = "mpi")]
    Mpi(MpiGroup),
    /// Ranks are threads or processes with a GPU each.
    #[cfg(feature = "nccl")]
    Nccl(NcclGroup),
}

/// Runs `$body` with `$group` bound to the engine's own process group.
macro_rules! on_engine {
    ($self:expr, |$group:ident| $body:expr) => {
        match $self {
            AnyProcessGroup::Local($group) => $body,
            #[cfg(feature = "mpi")]
            AnyProcessGroup::Mpi($group) => $body,
            #[cfg(feature = "nccl")]
            AnyProcessGroup::Nccl($group) => $body,
        }
    };
}

impl AnyProcessGroup {
    /// Returns the engine's name: `local`, `mpi` or `nccl`.
    pub(crate) fn engine(&self) -> &'static str {
        match self {
            Self::Local(_) => "local",
            #[cfg(feature = "mpi")]
            Self::Mpi(_) => "mpi",
            #[cfg(feature = "nccl")]
            Self::Nccl(_) => "nccl",
        }
    }

    /// Returns the members, as ranks of the world.
    pub(crate) fn members(&self) -> &[Rank] {
        on_engine!(self, |group| group.members())
    }

    /// Returns the number of members.
    pub(crate) fn size(&self) -> usize {
        self.members().len()
    }

    /// Returns whether the members are threads that exchange tensors of a device by reference.
    /// Kernels that read another member's tensor cast it as they do.
    pub(crate) fn shares_device<B: ShardBackend>(&self) -> bool {
        !B::IN_HOST_MEMORY && matches!(self, Self::Local(_))
    }

    /// Returns whether the members are threads of one process.
    pub(crate) fn shares_memory(&self) -> bool {
        matches!(self, Self::Local(_))
    }

    /// Returns the calling rank, as a rank of the world.
    pub(crate) fn rank(&self) -> Rank {
        on_engine!(self, |group| group.rank())
    }

    /// Returns every member's value, in rank order. All members call it.
    pub(crate) fn exchange<T: Message>(
        &self,
        op: &Op,
        value: T,
    ) -> Result<Vec<Arc<T>>, CollectiveError> {
        let _span = op.span(0);
        on_engine!(self, |group| group.exchange(op, value))
    }

    /// Returns every member's value, in rank order, on the member at position `to`, and `None` on the
    /// others, which receive no value. All members call it.
    pub(crate) fn gather_values<T: Message>(
        &self,
        op: &Op,
        to: usize,
        value: T,
    ) -> Result<Option<Vec<Arc<T>>>, CollectiveError> {
        on_engine!(self, |group| group.gather_values(op, to, value))
    }

    /// Returns every member's tensors, in rank order, and orders later operations of the calling
    /// thread after all that the members have issued. All members call it, and they share a device
    /// ([`shares_device`](Self::shares_device)) or host memory ([`shares_memory`](Self::shares_memory)).
    pub(crate) fn exchange_on_device<B: ShardBackend, T: std::any::Any + Send + Sync>(
        &self,
        op: &Op,
        device: &B::Device,
        tensors: T,
    ) -> Result<Vec<Fenced<B, T>>, CollectiveError> {
        match self {
            Self::Local(group) => group.exchange_on_device::<B, T>(op, device, tensors),
            #[cfg(any(feature = "mpi", feature = "nccl"))]
            _ => unreachable!("ranks of this engine do not share a device"),
        }
    }

    /// Returns the process group of the members that give the same `color`. All members call it.
    pub(super) fn split(&self, color: usize) -> Result<Self, CollectiveError> {
        match self {
            Self::Local(group) => group.split(color).map(Self::Local),
            #[cfg(feature = "mpi")]
            Self::Mpi(group) => group.split(color).map(Self::Mpi),
            #[cfg(feature = "nccl")]
            Self::Nccl(group) => group.split(color).map(Self::Nccl),
        }
    }

    /// Announces that this rank takes part in no further exchange.
    ///
    /// Only the `local` engine needs this: processes wait for each other at the end of a run.
    pub(super) fn leave(&self) {
        match self {
            Self::Local(group) => group.leave(),
            #[cfg(any(feature = "mpi", feature = "nccl"))]
            _ => {}
        }
    }

    /// Returns the failure that has ended the run, as far as this rank knows of one.
    #[cfg(any(feature = "mpi", feature = "nccl"))]
    pub(crate) fn failure(&self) -> Option<CollectiveError> {
        on_engine!(self, |group| group.failure())
    }

    /// Ends the run of all ranks with `failure`, unless an earlier failure has ended it.
    pub(crate) fn fail(&self, failure: CollectiveError) {
        on_engine!(self, |group| group.fail(failure));
    }
}

/// The process groups of a mesh, as one rank sees them.
#[derive(Clone, Debug)]
pub(crate) struct MeshGroups {
    /// Ranks that take different batches: all ranks, or those that have the same part of split matrices.
    pub(crate) data: Arc<AnyProcessGroup>,
    /// Ranks that share one copy of the parameters.
    pub(crate) shard: Arc<AnyProcessGroup>,
    /// Ranks that hold the same shard of different copies; `None` if there is one copy.
    pub(crate) replicate: Option<Arc<AnyProcessGroup>>,
    /// Data parallel ranks that have parts of the same rows, if there are several.
    pub(crate) context: Option<Arc<AnyProcessGroup>>,
    /// Ranks that have the parts of the same matrices, if there are several.
    pub(crate) tensor: Option<Arc<AnyProcessGroup>>,
}

impl MeshGroups {
    /// Splits `world` into the process groups of `mesh`. Every rank calls it.
    pub(crate) fn new(world: &Arc<AnyProcessGroup>, mesh: Mesh) -> Result<Self, CollectiveError> {
        let (data, tensor) = match mesh.tensor_size() {
            WorldSize::ONE => (world.clone(), None),
            _ => {
                let data = Arc::new(world.split(mesh.tensor_rank().index())?);
                (data, Some(Arc::new(world.split(mesh.rank.index())?)))
            }
        };
        let (shard, replicate) = match mesh.replicas() {
            WorldSize::ONE => (data.clone(), None),
            _ => {
                let shard = Arc::new(data.split(mesh.replica().index())?);
                (shard, Some(Arc::new(data.split(mesh.shard_rank().index())?)))
            }
        };
        let context = match mesh.context_size() {
            WorldSize::ONE => None,
            size if size == mesh.world => Some(data.clone()),
            _ => Some(Arc::new(data.split(mesh.batch_rank().index())?)),
        };
        Ok(Self { data, shard, replicate, context, tensor })
    }
}

/// Splits the shard group into blocks of `size` consecutive members, for
/// `reshard_after_forward = To(size)`, and returns the block of this rank.
pub(crate) fn blocks(
    shard: &AnyProcessGroup,
    mesh: Mesh,
    size: WorldSize,
) -> Result<AnyProcessGroup, CollectiveError> {
    shard.split(mesh.shard_rank().index() / size.size())
}

impl<B: ShardBackend> ProcessGroup<B> for AnyProcessGroup {
    fn all_gather(
        &self,
        op: &Op,
        device: &B::Device,
        shards: Vec<(usize, Float<B>)>,
        shard_len: usize,
        buffer: &Arc<GatherBuffer<B>>,
    ) -> Result<(), CollectiveError> {
        debug_assert!(
            self.shares_device::<B>()
                || shards.iter().all(|(_, shard)| shard.dtype() == buffer.dtype()),
            "a shard is cast to the buffer's type before the all-gather"
        );
        let _span = op.span(shard_len * self.size() * buffer.dtype().size());
        on_engine!(self, |group| group.all_gather(op, device, shards, shard_len, buffer))
    }

    fn all_gather_one(
        &self,
        op: &Op,
        device: &B::Device,
        shard: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let _span = op.span(bytes_of::<B>(&shard) * self.size());
        on_engine!(self, |group| ProcessGroup::<B>::all_gather_one(group, op, device, shard))
    }

    fn gather(
        &self,
        op: &Op,
        device: &B::Device,
        to: usize,
        shard: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let _span = op.span(bytes_of::<B>(&shard) * self.size());
        on_engine!(self, |group| ProcessGroup::<B>::gather(group, op, device, to, shard))
    }

    fn reduce_scatter(
        &self,
        op: &Op,
        device: &B::Device,
        request: ReduceScatter<'_, B>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let _span = op.span(request.gradients.iter().map(bytes_of::<B>).sum());
        on_engine!(self, |group| ProcessGroup::<B>::reduce_scatter(group, op, device, request))
    }

    fn broadcast(
        &self,
        op: &Op,
        device: &B::Device,
        tensor: Option<Float<B>>,
    ) -> Result<Float<B>, CollectiveError> {
        let _span = op.span(bytes_of::<B>(&tensor));
        on_engine!(self, |group| ProcessGroup::<B>::broadcast(group, op, device, tensor))
    }

    fn rotate(
        &self,
        op: &Op,
        device: &B::Device,
        tensor: Float<B>,
    ) -> Result<Float<B>, CollectiveError> {
        let _span = op.span(numel::<B>(&tensor) * tensor.dtype().size());
        on_engine!(self, |group| ProcessGroup::<B>::rotate(group, op, device, tensor))
    }
}

/// Returns the size of a tensor in bytes, and 0 for an absent one.
fn bytes_of<B: ShardBackend>(tensor: &Option<Float<B>>) -> usize {
    tensor.as_ref().map_or(0, |tensor| numel::<B>(tensor) * tensor.dtype().size())
}
