//! Panics on the threads of devices.
//!
//! CubeCL catches a panic of a task on a device's thread and goes on with the next task. Whoever waits for
//! the task's answer waits for ever. So a launch watches these threads, and ends with an error.

use std::cell::Cell;
use std::sync::{Mutex, Once};
use std::time::Duration;

use crate::error::{DevicePanic, IgnorePoison, panic_text};

/// Time between two looks at the devices' threads.
pub(super) const POLL: Duration = Duration::from_millis(100);

/// Time that ranks have to end by themselves after a panic on a device's thread.
pub(super) const GRACE: Duration = Duration::from_secs(2);

/// First letters of the names that CubeCL gives to the threads of devices.
const THREADS: [&str; 2] = ["DSD-", "DSU-"];

/// The number of panics on threads of devices so far, and the newest.
static PANICS: Mutex<(usize, Option<DevicePanic>)> = Mutex::new((0, None));

/// Sees the panics on threads of devices that come after it was made.
#[derive(Debug)]
pub(super) struct DeviceWatch {
    /// Number of panics that it has seen, and of those before.
    seen: Cell<usize>,
}

impl DeviceWatch {
    /// Starts to watch. The process's panic hook is still called for every panic.
    pub(super) fn start() -> Self {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let next = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                let current = std::thread::current();
                let thread = current.name().unwrap_or_default();
                if THREADS.iter().any(|prefix| thread.starts_with(prefix)) {
                    let message = panic_text(panic.payload()).unwrap_or("no message").to_string();
                    let mut panics = PANICS.lock().ignore_poison();
                    panics.0 += 1;
                    panics.1 = Some(DevicePanic { thread: thread.to_string(), message });
                }
                next(panic);
            }));
        });
        Self { seen: Cell::new(PANICS.lock().ignore_poison().0) }
    }

    /// Returns the newest panic, if one has come since the last call.
    pub(super) fn panic(&self) -> Option<DevicePanic> {
        let panics = PANICS.lock().ignore_poison();
        let seen = self.seen.replace(panics.0);
        panics.1.clone().filter(|_| panics.0 > seen)
    }
}
