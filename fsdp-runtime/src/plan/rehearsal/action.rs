//! One entry of the sequence that a rank's thread issues in a step.

use crate::runtime::schedule::decide::Pass;

/// The ranks that take part in a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peers {
    /// The shard group.
    Shard,
    /// The given number of neighbours in the shard group, under `ReshardAfterForward::To`.
    Block(usize),
    /// The ranks that hold the same shard of other replicas.
    Replicas,
    /// The tensor parallel ranks.
    Tensor,
    /// The context parallel ranks.
    Context,
}

/// A part of a unit's own computation, without that of the units inside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// A forward that is recorded for backward.
    Forward,
    /// The first forward of a unit that is recomputed, which keeps no activations.
    FirstRun,
    /// The recomputation of a forward in backward.
    Recompute,
    /// The backward.
    Backward,
}

/// One entry of the sequence that a rank's thread issues in a step. `unit` is an index in layout
/// order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Issues the all-gathers of a unit, one for each flat range.
    Gather {
        unit: usize,
        pass: Pass,
        /// Whether this is a prefetch.
        ahead: bool,
        peers: Peers,
        /// Number of all-gathers; 0 if only replicated parameters are copied to the device.
        gathers: usize,
        /// Bytes of the gathered flat ranges as they are sent, padding included.
        full: usize,
        /// Bytes of this rank's shards as they are sent.
        sent: usize,
        /// Bytes that are copied from host memory to the device first.
        from_host: usize,
    },
    /// Waits for the all-gathers of a unit.
    AwaitGather { unit: usize },
    /// Releases the gather buffers of a unit.
    Reshard { unit: usize },
    /// Computes.
    Compute { unit: usize, part: Part },
    /// The full gradients of a unit have arrived.
    Gradients { unit: usize },
    /// Issues the reduction of a unit's gradients in the shard group.
    Reduce {
        unit: usize,
        /// Whether the sharded gradients are scattered; else all gradients are all-reduced.
        scatters: bool,
        /// Bytes of the gradients of sharded parameters, as they are sent.
        sharded: usize,
        /// Bytes of the gradients of replicated parameters, as they are sent.
        replicated: usize,
        /// Bytes of the all-reduce among the replicas that follows, if one does.
        replicas: Option<usize>,
        /// Bytes of the reduced gradients that are copied to host memory.
        to_host: usize,
    },
    /// Waits for the reduction of a unit's gradients.
    AwaitReduce { unit: usize },
}
