//! Recording of operations in Burn's autodiff graph.

use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::ops::{Backward, NodeGuard, OpsKind};

use crate::backend::{Float, ModelBackend, Tracked};

/// The maximum number of a unit's inputs that an operation is ordered after.
pub(in crate::runtime) const MAX_ORDERING_INPUTS: usize = 3;

/// Records an operation with the given parents and result.
pub(super) fn record<B, O, const N: usize>(
    op: O,
    parents: [NodeGuard; N],
    state: O::State,
    value: Float<B>,
) -> Tracked<B>
where
    B: ModelBackend,
    O: Backward<B, N>,
{
    match op.prepare::<NoCheckpointing>(parents).compute_bound().stateful() {
        OpsKind::Tracked(op) => op.finish(state, value),
        OpsKind::UnTracked(op) => op.finish(value),
    }
}

/// Records an operation whose parents are `parent` and the first [`MAX_ORDERING_INPUTS`] of
/// `ordering_inputs`.
pub(super) fn record_after<B, O, S>(
    op: O,
    parent: NodeGuard,
    ordering_inputs: &[Tracked<B>],
    state: S,
    value: Float<B>,
) -> Tracked<B>
where
    B: ModelBackend,
    O: Backward<B, 1, State = S>
        + Backward<B, 2, State = S>
        + Backward<B, 3, State = S>
        + Backward<B, 4, State = S>,
{
    match ordering_inputs {
        [] => record::<B, O, 1>(op, [parent], state, value),
        [a] => record::<B, O, 2>(op, [parent, a.node()], state, value),
        [a, b] => record::<B, O, 3>(op, [parent, a.node(), b.node()], state, value),
        [a, b, c, ..] => {
            record::<B, O, 4>(op, [parent, a.node(), b.node(), c.node()], state, value)
        }
    }
}
