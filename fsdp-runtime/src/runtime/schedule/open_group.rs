//! The call of a unit of several fields, while modules of the unit have not run.

use crate::module::CallId;
use crate::param_group::UnitGroup;

/// The call of a group, until each of its modules has run.
#[derive(Debug)]
pub(super) struct OpenGroup {
    pub(super) call: CallId,
    /// Whether each module has run.
    has_run: Vec<bool>,
}

impl OpenGroup {
    /// Returns the call of a group before its first module. A module without parameters has no hooks,
    /// so nothing waits for it.
    pub(super) fn new(call: CallId, group: &UnitGroup) -> Self {
        let mut has_run = vec![true; group.modules];
        group.module_of.iter().for_each(|&module| has_run[module] = false);
        Self { call, has_run }
    }

    /// Notes that the modules of these parameters run.
    pub(super) fn run(&mut self, group: &UnitGroup, params: &[usize]) {
        for &param in params {
            self.has_run[group.module_of[param]] = true;
        }
    }

    /// Returns whether each module has run.
    pub(super) fn is_complete(&self) -> bool {
        self.has_run.iter().all(|has_run| *has_run)
    }
}
