//! Deferred optimizer steps, so that several parameters share one kernel launch.
//!
//! Burn's [`ModuleOptimizer`](burn::optim::ModuleOptimizer) passes parameters to an optimizer one
//! at a time and does not read the updated tensors in between. So a step may be launched later,
//! together with the steps of other parameters. Steps are deferred only while a sharded model is
//! mapped by the optimizer: at the end of that call the remaining ones are launched.

use std::any::Any;
use std::cell::RefCell;
use std::sync::{Arc, Mutex};

use crate::ignore_poison::IgnorePoison;

/// Function that runs the recorded operations of a device, and the name of the device.
type Drain = (String, Box<dyn FnOnce() + Send>);

/// Deferred steps of one kind of backend.
pub(super) trait DeferredSteps: Any + Send + Sync {
    /// Launches the steps.
    fn launch(&self);
}

/// Deferred steps of one call of an optimizer.
#[derive(Default)]
pub struct StepBatch {
    /// Functions that run recorded operations, one for each device.
    drains: Mutex<Vec<Drain>>,
    /// At most one value of each type.
    steps: Mutex<Vec<Arc<dyn DeferredSteps>>>,
}

impl StepBatch {
    /// Returns the deferred steps of type `S`, to which a step may be added.
    #[cfg_attr(not(feature = "cube"), allow(dead_code, reason = "only CubeCL devices defer steps"))]
    pub(super) fn steps<S: DeferredSteps + Default>(&self) -> Arc<S> {
        let mut steps = self.steps.lock().ignore_poison();
        let own = |steps: &Arc<dyn DeferredSteps>| {
            let steps: Arc<dyn Any + Send + Sync> = steps.clone();
            steps.downcast::<S>().ok()
        };
        steps.iter().find_map(own).unwrap_or_else(|| {
            let new = Arc::new(S::default());
            steps.push(new.clone());
            new
        })
    }

    /// Adds a function that runs the recorded operations of a device, which may defer steps. It runs
    /// before the deferred steps are launched.
    pub fn drain_first(&self, device: String, drain: impl FnOnce() + Send + 'static) {
        let mut drains = self.drains.lock().ignore_poison();
        if !drains.iter().any(|(other, _)| *other == device) {
            drains.push((device, Box::new(drain)));
        }
    }

    /// Launches the deferred steps.
    fn launch(&self) {
        for (_, drain) in std::mem::take(&mut *self.drains.lock().ignore_poison()) {
            drain();
        }
        for steps in std::mem::take(&mut *self.steps.lock().ignore_poison()) {
            steps.launch();
        }
    }
}

thread_local! {
    static OPEN: RefCell<Option<Arc<StepBatch>>> = const { RefCell::new(None) };
}

/// Returns the batch that a step on this thread may be deferred to; `None` outside of [`scope`].
pub fn open() -> Option<Arc<StepBatch>> {
    OPEN.with_borrow(Clone::clone)
}

/// Runs `f`, in which this thread may defer steps, then launches the deferred steps. If `f` panics
/// they are discarded.
pub fn scope<T>(f: impl FnOnce() -> T) -> T {
    struct Scope(Option<Arc<StepBatch>>);
    impl Drop for Scope {
        fn drop(&mut self) {
            OPEN.set(self.0.take());
        }
    }
    let batch = Arc::new(StepBatch::default());
    let result = {
        let _scope = Scope(OPEN.replace(Some(batch.clone())));
        f()
    };
    batch.launch();
    result
}
