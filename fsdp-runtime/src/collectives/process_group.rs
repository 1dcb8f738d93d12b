//! The collectives on tensors that every engine implements.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::DType;
use fsdp_kernels::RankMean;

use super::op::Op;
use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{Float, ShardBackend};
use crate::error::CollectiveError;
use crate::layout::UnitLayout;

/// Reduction of one gradient of a unit, and the part of the result that this rank keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reduce {
    /// Elements of the flattened gradient that this rank keeps: its shard of a sharded parameter,
    /// or all elements of a replicated one.
    pub(crate) range: Range<usize>,
    /// Shape of the kept elements.
    pub(crate) shape: Vec<usize>,
    /// Index of the sharded matrix in the unit's layout; `None` for a replicated parameter.
    pub(crate) segment: Option<usize>,
    /// Type in which every rank sends this gradient; the sum is in f32. All matrices of one flat
    /// range have the same type, and different flat ranges may have different ones.
    pub(crate) dtype: DType,
}

/// Input of [`ProcessGroup::reduce_scatter`]: the gradients of one unit.
pub(crate) struct ReduceScatter<'a, B: ShardBackend> {
    /// This rank's gradients; `None` where it has none, which counts as zeros.
    pub(crate) gradients: Vec<Option<Float<B>>>,
    /// Reduction of each gradient, in the order of `gradients`.
    pub(crate) keep: &'a [Reduce],
    /// Layout of the gradients' unit over the ranks of the process group.
    #[cfg_attr(
        not(any(feature = "mpi", feature = "nccl")),
        allow(dead_code, reason = "threads need no layout to reduce")
    )]
    pub(crate) layout: &'a UnitLayout,
    /// Number that each sum is divided by.
    pub(crate) divisor: usize,
}

/// Returns means, each with the index of its gradient as it was given.
pub(super) fn means_of<B: ShardBackend>(
    means: impl IntoIterator<Item = (usize, RankMean<Float<B>>)>,
) -> impl Iterator<Item = (usize, Float<B>)> {
    let (entries, means): (Vec<_>, Vec<_>) = means.into_iter().unzip();
    entries.into_iter().zip(B::rank_means(means))
}

/// Returns the position of the member before the one at `index`, in a ring.
pub(super) fn before(index: usize, members: usize) -> usize {
    (index + members - 1) % members
}

/// Collectives on tensors among the members of a process group.
///
/// Every method blocks, so only the communication thread calls them. An absent tensor (`None`)
/// stands for zeros. A result is absent where every member's tensor is.
pub(crate) trait ProcessGroup<B: ShardBackend>: fmt::Debug + Send + Sync {
    /// Fills `buffer` with the shards of all members, in rank order.
    ///
    /// Each member's part of the buffer has `shard_len` elements. `shards` are the calling rank's
    /// tensors, each with its offset in the buffer, in elements.
    fn all_gather(
        &self,
        op: &Op,
        device: &B::Device,
        shards: Vec<(usize, Float<B>)>,
        shard_len: usize,
        buffer: &Arc<GatherBuffer<B>>,
    ) -> Result<(), CollectiveError>;

    /// Returns every member's shard of one parameter, in rank order.
    fn all_gather_one(
        &self,
        op: &Op,
        device: &B::Device,
        shard: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError>;

    /// Returns every member's shard of one parameter on the member at position `to`. The result on
    /// other members is empty, and no tensor is sent to them.
    fn gather(
        &self,
        op: &Op,
        device: &B::Device,
        to: usize,
        shard: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError>;

    /// Sums each gradient over the members, in f32, and divides it; returns the elements that this
    /// rank keeps.
    fn reduce_scatter(
        &self,
        op: &Op,
        device: &B::Device,
        request: ReduceScatter<'_, B>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError>;

    /// Returns the tensor of the one member that passes one.
    fn broadcast(
        &self,
        op: &Op,
        device: &B::Device,
        tensor: Option<Float<B>>,
    ) -> Result<Float<B>, CollectiveError>;

    /// Sends a tensor to the next member, where the first comes after the last, and returns that of the member
    /// before. The tensors of all members have one shape and dtype.
    fn rotate(
        &self,
        op: &Op,
        device: &B::Device,
        tensor: Float<B>,
    ) -> Result<Float<B>, CollectiveError>;
}
