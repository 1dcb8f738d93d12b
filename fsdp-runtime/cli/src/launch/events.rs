//! Events that the supervisor waits for, with time limits.

use std::time::Duration;

/// Time after the first failure in which later failures are still collected. The cause of a failure
/// may be reported after a reaction to it; `supervisor.rs` explains why.
pub(super) const SETTLE_TIME: Duration = Duration::from_millis(300);

/// Time to wait for the end of killed processes, and for the end of output streams.
pub(super) const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Something that happened to a process or to the launcher.
#[derive(Clone, Copy, Debug)]
pub(super) enum Event {
    /// A process has ended.
    Exited {
        /// Number of the attempt that started the process.
        attempt: usize,
        /// Index of the process among those of the attempt.
        index: usize,
    },
    /// The standard output or standard error of a process has ended.
    StreamEnded {
        /// Number of the attempt that started the process.
        attempt: usize,
    },
    /// The launcher has received a signal.
    Signal(i32),
}
