//! Options of state dicts in memory.

use crate::checkpoint::filter::ParamFilter;

/// Options of taking and loading state dicts in memory: which parameters they cover, and whether a
/// state must have exactly these. The default is all parameters, strictly.
///
/// ```
/// use fsdp_runtime::state::{ParamFilter, StateDictOptions};
///
/// // The encoder's trained parameters, from a state that may lack some of them.
/// let filter = ParamFilter::new().with_trainable_only().with_submodule("encoder");
/// let options = StateDictOptions::new().with_filter(filter).with_strict(false);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct StateDictOptions {
    pub(super) filter: ParamFilter,
    /// Whether missing and unexpected keys are listed in the report, and no error.
    pub(super) lenient: bool,
}

impl StateDictOptions {
    /// Returns the default options: all parameters, strictly.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes or loads the parameters that `filter` selects, and the optimizer state of these. On a
    /// load all others keep their values and their optimizer state, and their keys in the state are
    /// skipped. A tied parameter goes by its owner's path.
    pub fn with_filter(mut self, filter: ParamFilter) -> Self {
        self.filter = filter;
        self
    }

    /// Sets whether a state that is loaded must have exactly the selected parameters, as it must by
    /// default. With `false` missing and unexpected keys are listed in the
    /// [`LoadReport`](crate::state::LoadReport), and missing parameters keep their values and their
    /// optimizer state. A tensor of another shape or dtype stays an error, as with PyTorch's
    /// `strict=False`.
    pub fn with_strict(mut self, strict: bool) -> Self {
        self.lenient = !strict;
        self
    }
}
