//! The end of a process: an exit code or a signal.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use fsdp_runtime::launch::env::{EXIT_PEER_FAILED, EXIT_REFUSED};
use rustix::process::Signal;

/// Exit code of a Rust program that panicked.
const PANIC: i32 = 101;

/// The end of a process: an exit code or a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exit {
    /// The process ended with an exit code.
    Code(i32),
    /// A signal ended the process.
    Signal(i32),
}

impl Exit {
    pub(super) fn new(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, Some(signal)) => Self::Signal(signal),
            // Only a stopped process has neither, and `Child::wait` does not report stopped
            // processes.
            (None, None) => Self::Code(1),
        }
    }

    /// Returns whether the exit code is 0.
    pub(super) fn is_success(self) -> bool {
        self == Self::Code(0)
    }

    /// Returns whether a restart would fail in the same way: the program does not exist (127) or
    /// cannot be executed (126), or was refused its arguments (2, the code of clap) or another input
    /// ([`EXIT_REFUSED`]).
    pub(super) fn is_refusal(self) -> bool {
        matches!(self, Self::Code(2 | 126 | 127 | EXIT_REFUSED))
    }

    /// Returns how likely it is that the process ended because another process had failed, from 0
    /// (a cause) to 3 (a reaction). A rank that loses its peers returns an error; it neither panics
    /// nor is killed.
    pub(super) fn likely_reaction(self) -> u8 {
        match self {
            Self::Signal(signal) if signal != Signal::ABORT.as_raw() => 0,
            Self::Signal(_) | Self::Code(PANIC) => 1,
            Self::Code(EXIT_PEER_FAILED) => 3,
            Self::Code(_) => 2,
        }
    }

    /// Returns the exit code as `sh` reports it: 128 + the signal for a process that was killed. 1
    /// for a code outside of 0 to 255.
    pub(super) fn exit_code(self) -> u8 {
        let code = match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        };
        u8::try_from(code).unwrap_or(1)
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "killed by {}", signal_name(*signal)),
        }
    }
}

/// Returns the name of a signal, such as `SIGTERM`, or `signal 40` for one without a name.
pub(super) fn signal_name(signal: i32) -> String {
    match signal_hook::low_level::signal_name(signal) {
        Some(name) => name.to_string(),
        None => format!("signal {signal}"),
    }
}
