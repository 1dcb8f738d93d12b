//! When a unit is gathered and resharded.

use crate::options::ReshardAfterForward;

/// When a unit is gathered and resharded. Programs may change it between steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnitControl {
    /// State of the gathered parameters between forward and backward. It is neither `To(1)` nor `To`
    /// with all ranks.
    pub(crate) reshard: ReshardAfterForward,
    /// Whether the unit is resharded after the backward of a micro-batch that another one follows.
    pub(crate) reshard_after_backward: bool,
    /// Whether the unit has several fields, between whose forwards it stays gathered.
    pub(crate) is_group: bool,
    /// Units to prefetch in forward, in place of those that come next.
    pub(crate) forward_prefetch: Option<Vec<usize>>,
    /// Units to prefetch in backward, in place of those that ran forward before.
    pub(crate) backward_prefetch: Option<Vec<usize>>,
}

impl UnitControl {
    /// Returns the settings of a unit that no option names.
    pub(crate) fn new(reshard: ReshardAfterForward) -> Self {
        Self {
            reshard,
            reshard_after_backward: true,
            is_group: false,
            forward_prefetch: None,
            backward_prefetch: None,
        }
    }

    /// Returns whether the unit has gather buffers of its own, because it stays gathered while other
    /// units run.
    pub(crate) fn has_own_buffers(&self) -> bool {
        self.is_group || self.reshard == ReshardAfterForward::Never || !self.reshard_after_backward
    }
}
