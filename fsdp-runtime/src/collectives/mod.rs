//! Process groups: the collectives that units need, over one of several engines.
//!
//! [`local`] is the engine of thread ranks. [`group`] is any engine's group; [`comm`] runs a rank's
//! collectives in issue order on a thread of its own and hands over results that are waited for.

pub(crate) mod comm;
pub(crate) mod group;
pub(crate) mod local;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::backend::{Float, ShardBackend};
use crate::error::CollectiveError;
use crate::slot::Slot;

/// What a collective does and for which unit: every rank issues the same ones in the same order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Op {
    /// The operation, in PyTorch's words.
    pub(crate) name: &'static str,
    /// The unit's path, or what else the collective is for.
    pub(crate) unit: Arc<str>,
}

impl Op {
    pub(crate) fn new(name: &'static str, unit: impl Into<Arc<str>>) -> Self {
        Self { name, unit: unit.into() }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.name, self.unit)
    }
}

/// How one gradient of a unit is reduced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reduce {
    /// The elements this rank keeps: its fragment, or all of a replicated parameter's.
    pub(crate) range: Range<usize>,
    /// The shape it keeps them in.
    pub(crate) shape: Vec<usize>,
}

/// Collectives on tensors. All block: the communication thread calls them.
///
/// `None` in place of a tensor stands for zeros, and a result is `None` where no rank has one.
pub(crate) trait ProcessGroup<B: ShardBackend>: fmt::Debug + Send + Sync {
    /// Fills `slot` with every rank's fragments, given this rank's and their offsets (in elements).
    fn all_gather(
        &self,
        op: &Op,
        fragments: Vec<(usize, Float<B>)>,
        slot: &Slot<B>,
    ) -> Result<(), CollectiveError>;

    /// Every rank's fragment of one parameter, in rank order.
    fn all_gather_one(
        &self,
        op: &Op,
        fragment: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError>;

    /// As [`all_gather_one`](Self::all_gather_one), for the member at position `to` alone. What the
    /// others get is not to be used.
    fn gather(
        &self,
        op: &Op,
        to: usize,
        fragment: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let _ = to;
        self.all_gather_one(op, fragment)
    }

    /// The sum over ranks of each gradient over `divisor`, in the range this rank keeps.
    fn reduce_scatter(
        &self,
        op: &Op,
        gradients: Vec<Option<Float<B>>>,
        keep: &[Reduce],
        divisor: usize,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError>;

    /// The first rank's tensor, given by that rank alone.
    fn broadcast(&self, op: &Op, tensor: Option<Float<B>>) -> Result<Float<B>, CollectiveError>;
}
