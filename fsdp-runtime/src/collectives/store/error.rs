//! The error of processes that cannot connect to each other.

use std::time::Duration;

use crate::layout::Rank;

/// Error of processes of a launch that cannot connect to each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The name of the main process's host has no address.
    #[error(
        "the host `{host}` of the main process does not resolve ({reason}); set MASTER_ADDR, or \
         `main_process_ip`, to the name or address of the machine of rank 0"
    )]
    Unresolved {
        /// Name of the host.
        host: String,
        /// Error of the system's name resolution.
        reason: String,
    },
    /// Rank 0 cannot listen at the host and port.
    #[error(
        "rank 0 cannot listen at {host}:{port} ({reason}); set MASTER_PORT, or `main_process_port`, \
         to a port that is free, and MASTER_ADDR to an address of this machine, or FSDP_LISTEN to one \
         if others reach it by another"
    )]
    CannotListen {
        /// Host of rank 0.
        host: String,
        /// TCP port of rank 0.
        port: u16,
        /// Error of the operating system.
        reason: String,
    },
    /// A rank that could not connect to rank 0 within the time-out.
    #[error(
        "rank 0 cannot be reached at {host}:{port} within {waited:?} ({reason}); is it started, and \
         the port open between the machines? It stops listening once it has all ranks: a rank that \
         is started twice may come too late"
    )]
    Unreachable {
        /// Host of rank 0.
        host: String,
        /// TCP port of rank 0.
        port: u16,
        /// Time for which this rank has tried to connect.
        waited: Duration,
        /// Error of the last attempt.
        reason: String,
    },
    /// A connection that rank 0 refused. Rank 0 belongs to another run, or is connected to another
    /// process with this rank.
    #[error("rank 0 at {host}:{port} refused rank {rank}: {reason}; is another run at this port?")]
    Refused {
        /// Host of rank 0.
        host: String,
        /// TCP port of rank 0.
        port: u16,
        /// Rank that was refused.
        rank: Rank,
        /// Reason of rank 0 for the refusal.
        reason: String,
    },
    /// A program that listens at the host and port of rank 0, and does not know the secret of the
    /// run.
    #[error(
        "what listens at {host}:{port} does not know the secret of this run; set FSDP_RUN_SECRET to \
         one text on every rank, and look for another run at this port"
    )]
    Secret {
        /// Host of rank 0.
        host: String,
        /// TCP port of rank 0.
        port: u16,
    },
    /// A program that is not rank 0 listens at the host and port.
    #[error(
        "what listens at {host}:{port} is not rank 0 of this program ({reason}); set MASTER_PORT to \
         another port on every rank"
    )]
    Foreign {
        /// Host of rank 0.
        host: String,
        /// TCP port of rank 0.
        port: u16,
        /// Description of the wrong answer of the program at the port.
        reason: String,
    },
    /// A system that starts no thread on rank 0 to serve the other ranks.
    #[error("rank 0 cannot start a thread for the other ranks: {reason}")]
    NoThread {
        /// Error of the operating system.
        reason: String,
    },
}
