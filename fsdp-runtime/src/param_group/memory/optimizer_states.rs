//! The size of the state that this crate's optimizers keep for a model.
//!
//! Burn's [`ModuleOptimizer`](burn::optim::ModuleOptimizer) does not show its state without copying
//! it. So each optimizer of this crate reports the bytes of a parameter's state when it steps the
//! parameter ([`report`]), and the mapper that steps the model reads the report ([`reported`]).

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use burn::module::ParamId;

use crate::error::IgnorePoison;

thread_local! {
    /// Report of the last step on this thread.
    static REPORT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Reports the bytes of state that the optimizer keeps for the parameter that it has just stepped.
pub(crate) fn report(bytes: usize) {
    REPORT.set(Some(bytes));
}

/// Runs the step of a parameter. Also returns what the optimizer reported, if it did.
pub(crate) fn reported<T>(step: impl FnOnce() -> T) -> (T, Option<usize>) {
    REPORT.set(None);
    let result = step();
    (result, REPORT.take())
}

/// Sizes of the state of each parameter of a model. Clones of a model share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct OptimizerStates(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    params: HashMap<ParamId, usize>,
    probes: HashMap<ParamId, usize>,
    /// Parameters whose gradients a backward pass has returned, and that no optimizer of this crate
    /// has stepped since.
    waiting: HashSet<ParamId>,
    /// Size that was last returned.
    told: Option<StateSize>,
}

/// The size of an optimizer's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StateSize {
    /// The state of each parameter is known.
    Known {
        /// Bytes of the state of parameters.
        params: usize,
        /// Bytes of the state of the probes of the optimizer's check.
        probes: usize,
    },
    /// An optimizer of another crate steps some of the parameters.
    Unknown,
}

impl OptimizerStates {
    /// Records that an optimizer may step a parameter, which has a gradient.
    pub(crate) fn expect(&self, id: ParamId) {
        let mut state = self.0.lock().ignore_poison();
        if !state.params.contains_key(&id) {
            state.waiting.insert(id);
        }
    }

    /// Records what was reported for a parameter.
    pub(crate) fn set(&self, id: ParamId, bytes: Option<usize>) {
        let Some(bytes) = bytes else { return };
        let mut state = self.0.lock().ignore_poison();
        state.waiting.remove(&id);
        state.params.insert(id, bytes);
    }

    /// Records what was reported for a parameter. If nothing was, the size of its state is unknown.
    pub(crate) fn replace(&self, id: ParamId, bytes: Option<usize>) {
        if bytes.is_none() {
            let mut state = self.0.lock().ignore_poison();
            state.params.remove(&id);
            state.waiting.insert(id);
        }
        self.set(id, bytes);
    }

    /// Records what was reported for the probe of a parameter.
    pub(crate) fn set_probe(&self, id: ParamId, bytes: Option<usize>) {
        if let Some(bytes) = bytes {
            self.0.lock().ignore_poison().probes.insert(id, bytes);
        }
    }

    /// Returns the size after a step, if it has changed since the last call.
    pub(crate) fn changed(&self) -> Option<StateSize> {
        let mut state = self.0.lock().ignore_poison();
        let size = match state.waiting.is_empty() {
            true => StateSize::Known {
                params: state.params.values().sum(),
                probes: state.probes.values().sum(),
            },
            false => StateSize::Unknown,
        };
        (state.told.replace(size) != Some(size)).then_some(size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parameter_that_no_report_names_makes_the_size_unknown() {
        let states = OptimizerStates::default();
        let [a, b] = [ParamId::new(), ParamId::new()];
        states.expect(a);
        states.expect(b);
        let step = |id, bytes: Option<usize>| {
            let (_, found) = reported(|| bytes.map_or((), report));
            states.set(id, found);
        };
        step(a, Some(8));
        step(b, None);
        assert_eq!(states.changed(), Some(StateSize::Unknown));
        step(b, Some(4));
        states.set_probe(ParamId::new(), Some(2));
        let known = StateSize::Known { params: 12, probes: 2 };
        assert_eq!(states.changed(), Some(known));
        // A later step may leave a parameter out; its state stays.
        states.expect(a);
        assert_eq!(states.changed(), None);
        step(a, Some(6));
        assert_eq!(states.changed(), Some(StateSize::Known { params: 10, probes: 2 }));
    }
}
