//! Waiting for NCCL: polling, together with the other ranks' failures and the time-out.

use std::time::{Duration, Instant};

use crate::collectives::cuda::{CudaError, NcclError};
use crate::collectives::op::Op;
use crate::collectives::store::HostGroup;
use crate::error::CollectiveError;

/// Interval in which a waiting rank asks the other ranks whether the run has failed.
const FAILURE_CHECK: Duration = Duration::from_millis(50);
/// Time limit of NCCL for forming a communicator.
const SETUP: Duration = Duration::from_secs(60);
/// Number of polls that yield before sleeps begin: a sleep takes at least 60 µs or so.
const YIELDS: u32 = 200;
/// Time to wait, after an error of NCCL, for a peer to report the cause.
const CAUSE_WAIT: Duration = Duration::from_millis(500);

/// Reason why a collective did not complete.
#[derive(Debug)]
pub(super) enum Interruption {
    /// NCCL refused a call, or a collective failed in NCCL.
    Nccl(NcclError),
    /// The CUDA driver refused a call, or a kernel failed.
    Cuda(CudaError),
    /// A failure of another rank or collective has ended the run.
    Ended(CollectiveError),
    /// The collective did not complete within the time-out.
    TimedOut,
}

impl From<NcclError> for Interruption {
    fn from(error: NcclError) -> Self {
        Self::Nccl(error)
    }
}

impl From<CudaError> for Interruption {
    fn from(error: CudaError) -> Self {
        Self::Cuda(error)
    }
}

impl Interruption {
    /// Converts a failed collective into the error that ends the run, preferring a peer's reported
    /// cause. Ends the run with that error.
    pub(super) fn end_run(self, host: &HostGroup, op: &Op) -> CollectiveError {
        let reason = match self {
            Self::Ended(failure) => return failure,
            Self::TimedOut => {
                let others = || host.members().iter().filter(|&&member| member != host.rank());
                // A rank that waits in the collective contacts the others all the time.
                let mut missing = host.silent(host.timeout() / 2);
                if missing.is_empty() {
                    missing = others().copied().collect();
                }
                return host.fail(CollectiveError::Timeout {
                    op: op.name,
                    unit: op.unit.to_string(),
                    missing,
                    waited: host.timeout(),
                });
            }
            Self::Nccl(error) => format!("NCCL: {error}"),
            Self::Cuda(error) => error.to_string(),
        };
        let failed_at = Instant::now();
        while failed_at.elapsed() < CAUSE_WAIT {
            if let Some(failure) = host.heartbeat() {
                return failure;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let (rank, unit) = (host.rank(), op.unit.to_string());
        host.fail(CollectiveError::Transport { rank, op: op.name, unit, reason })
    }
}

/// A wait that polls. It yields between the first polls, unless it is in the background; between later
/// ones it sleeps, and regularly asks the other ranks for failures.
pub(super) struct Watch<'a> {
    /// Host group that reports failures of other ranks; `None` where none are asked for.
    host: Option<&'a HostGroup>,
    timeout: Duration,
    started: Instant,
    last_check: Instant,
    polls: u32,
    /// Whether another thread waits for what is watched, so that polls need not be frequent.
    is_background: bool,
}

impl<'a> Watch<'a> {
    /// Starts a wait for a collective, with the time-out of the process group.
    pub(super) fn new(host: &'a HostGroup) -> Self {
        Self::with(Some(host), host.timeout())
    }

    /// Starts a wait for a collective that this thread only watches.
    pub(super) fn in_background(host: &'a HostGroup) -> Self {
        Self { is_background: true, ..Self::new(host) }
    }

    /// Starts a wait for NCCL to form a communicator, with a time-out of at least one minute: this
    /// takes seconds even if every rank is present.
    pub(super) fn of_setup(host: &'a HostGroup) -> Self {
        Self::with(Some(host), host.timeout().max(SETUP))
    }

    /// Starts a wait that does not ask the other ranks for failures.
    pub(super) fn alone(timeout: Duration) -> Self {
        Self::with(None, timeout)
    }

    fn with(host: Option<&'a HostGroup>, timeout: Duration) -> Self {
        let now = Instant::now();
        Self { host, timeout, started: now, last_check: now, polls: 0, is_background: false }
    }

    /// Starts the time-out again.
    pub(super) fn restart(&mut self) {
        self.started = Instant::now();
    }

    /// Waits until the next poll.
    ///
    /// # Errors
    ///
    /// Returns the failure of another rank, or that the time-out has passed.
    pub(super) fn pause(&mut self) -> Result<(), Interruption> {
        self.polls += 1;
        if self.polls < YIELDS && !self.is_background {
            std::thread::yield_now();
            return Ok(());
        }
        if self.last_check.elapsed() > FAILURE_CHECK {
            if let Some(failure) = self.host.and_then(HostGroup::heartbeat) {
                return Err(Interruption::Ended(failure));
            }
            self.last_check = Instant::now();
        }
        if self.started.elapsed() > self.timeout {
            return Err(Interruption::TimedOut);
        }
        let is_frequent = self.polls < 2000 && !self.is_background;
        std::thread::sleep(Duration::from_micros(if is_frequent { 20 } else { 200 }));
        Ok(())
    }
}
