//! Why ranks cannot meet.

use std::time::Duration;

use crate::layout::Rank;

/// Why the processes of a launch cannot reach each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A name without an address.
    #[error(
        "the host `{host}` of the main process does not resolve ({reason}); set MASTER_ADDR, or \
         `main_process_ip`, to the name or address of the machine of rank 0"
    )]
    Unresolved {
        /// The name.
        host: String,
        /// The resolver's reason.
        reason: String,
    },
    /// Rank 0 cannot listen.
    #[error(
        "rank 0 cannot listen at {host}:{port} ({reason}); set MASTER_PORT, or `main_process_port`, \
         to a port that is free, and MASTER_ADDR to an address of this machine"
    )]
    CannotListen {
        /// The main process's host.
        host: String,
        /// Its port.
        port: u16,
        /// The system's reason.
        reason: String,
    },
    /// Rank 0 does not answer.
    #[error(
        "rank 0 cannot be reached at {host}:{port} within {waited:?} ({reason}); is it started, and \
         the port open between the machines?"
    )]
    Unreachable {
        /// The main process's host.
        host: String,
        /// Its port.
        port: u16,
        /// How long it was tried.
        waited: Duration,
        /// The reason of the last attempt.
        reason: String,
    },
    /// Rank 0 belongs to another run, or has this rank already.
    #[error("rank 0 at {host}:{port} refused rank {rank}: {reason}; is another run at this port?")]
    Refused {
        /// The main process's host.
        host: String,
        /// Its port.
        port: u16,
        /// The rank that was refused.
        rank: Rank,
        /// Rank 0's reason.
        reason: String,
    },
    /// Something else answers.
    #[error(
        "what listens at {host}:{port} is not rank 0 of this program ({reason}); set MASTER_PORT to \
         another port on every rank"
    )]
    Foreign {
        /// The main process's host.
        host: String,
        /// Its port.
        port: u16,
        /// What was wrong with its answer.
        reason: String,
    },
    /// No thread can be started for the other ranks.
    #[error("rank 0 cannot start a thread for the other ranks: {reason}")]
    NoThread {
        /// The system's reason.
        reason: String,
    },
}
