//! Process groups: the collectives that units need, over one of several engines.
//!
//! [`local`] is the engine of thread ranks, `mpi` that of processes, and `nccl` that of either on GPUs
//! of their own, which exchange values at the hub of `local` or over `store`. [`group`] is any engine's group; [`comm`] runs a rank's
//! collectives in issue order on a thread of its own and hands over results that are waited for.

pub(crate) mod comm;
#[cfg(any(feature = "cli", feature = "nccl"))]
pub mod cuda;
#[cfg(any(feature = "mpi", feature = "nccl"))]
mod failure;
pub(crate) mod group;
pub(crate) mod local;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
#[cfg(any(feature = "mpi", feature = "nccl"))]
mod regions;
#[cfg(feature = "nccl")]
pub(crate) mod store;

#[cfg(test)]
mod conformance;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::DType;

use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{Float, ShardBackend};
use crate::error::CollectiveError;
use crate::layout::UnitLayout;

/// What a collective does and for which unit: every rank issues the same ones in the same order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Op {
    /// The operation, in PyTorch's words.
    pub(crate) name: &'static str,
    /// The unit's path, or what else the collective is for.
    pub(crate) unit: Arc<str>,
    /// Elements of the whole, the same on every rank; 0 for what is no tensor. Compared where the
    /// launch is told to `debug`.
    pub(crate) size: usize,
}

impl Op {
    pub(crate) fn new(name: &'static str, unit: impl Into<Arc<str>>) -> Self {
        Self { name, unit: unit.into(), size: 0 }
    }

    /// With the number of elements.
    pub(crate) fn of(self, size: usize) -> Self {
        Self { size, ..self }
    }

    /// Whether two ranks do the same.
    pub(crate) fn is(&self, other: &Self, debug: bool) -> bool {
        self.name == other.name && self.unit == other.unit && (!debug || self.size == other.size)
    }

    /// For a message that says how two ranks differ.
    pub(crate) fn describe(name: &str, unit: &str, size: u64, debug: bool) -> String {
        match debug {
            true => format!("{name} of {unit} ({size} elements)"),
            false => format!("{name} of {unit}"),
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.name, self.unit)
    }
}

/// The positions of the members that gave `color`, and the place among them of the one at `own`, which
/// did too.
fn of_color(colors: &[Arc<usize>], color: usize, own: usize) -> (Vec<usize>, usize) {
    let same = |&index: &usize| *colors[index] == color;
    let positions: Vec<usize> = (0..colors.len()).filter(same).collect();
    let index = positions.iter().position(|&index| index == own).expect("own color");
    (positions, index)
}

/// How one gradient of a unit is reduced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reduce {
    /// The elements this rank keeps: its shard, or all of a replicated parameter's.
    pub(crate) range: Range<usize>,
    /// The shape it keeps them in.
    pub(crate) shape: Vec<usize>,
    /// The matrix of the unit's layout that `range` is this rank's shard of; `None` where every rank
    /// keeps the same.
    pub(crate) segment: Option<usize>,
    /// The type in which the gradient travels, whatever rank it comes from. Its sum is in f32. It is
    /// the same for all matrices of one flat range; others may have others.
    pub(crate) dtype: DType,
}

/// Collectives on tensors. All block: the communication thread calls them.
///
/// `None` in place of a tensor stands for zeros, and a result is `None` where no rank has one.
pub(crate) trait ProcessGroup<B: ShardBackend>: fmt::Debug + Send + Sync {
    /// Fills `slot` with every rank's shard, of `shard_len` elements each, in rank order; given this
    /// rank's shards and their offsets (in elements).
    fn all_gather(
        &self,
        op: &Op,
        device: &B::Device,
        shards: Vec<(usize, Float<B>)>,
        shard_len: usize,
        slot: &Arc<GatherBuffer<B>>,
    ) -> Result<(), CollectiveError>;

    /// Every rank's shard of one parameter, in rank order.
    fn all_gather_one(
        &self,
        op: &Op,
        device: &B::Device,
        shard: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError>;

    /// As [`all_gather_one`](Self::all_gather_one), for the member at position `to` alone. What the
    /// others get is not to be used.
    fn gather(
        &self,
        op: &Op,
        device: &B::Device,
        to: usize,
        shard: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let _ = to;
        self.all_gather_one(op, device, shard)
    }

    /// The sum over ranks of each gradient over `divisor`, in f32, in the range this rank keeps.
    /// `layout` is that of the gradients' unit, over the ranks of this group.
    fn reduce_scatter(
        &self,
        op: &Op,
        device: &B::Device,
        gradients: Vec<Option<Float<B>>>,
        keep: &[Reduce],
        layout: &UnitLayout,
        divisor: usize,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError>;

    /// The tensor that one rank alone gives.
    fn broadcast(
        &self,
        op: &Op,
        device: &B::Device,
        tensor: Option<Float<B>>,
    ) -> Result<Float<B>, CollectiveError>;
}
