//! The exit codes by which a rank tells `fsdp launch` why it ended.

use super::env::{EXIT_PEER_FAILED, EXIT_REFUSED, EnvError};
use super::error::EngineError;
use crate::error::{CheckpointError, CollectiveError, Error, LaunchError};

/// Exit code of any other error, which a restart may cure.
const EXIT_FAILED: i32 = 1;

impl Error {
    /// Returns the exit code of a rank that ends with this error: [`EXIT_PEER_FAILED`] if another
    /// rank failed, [`EXIT_REFUSED`] if a restart would fail in the same way, and otherwise 1.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Collective(CollectiveError::PeerFailed { .. }) => EXIT_PEER_FAILED,
            Self::Shard(_) | Self::Lora(_) => EXIT_REFUSED,
            Self::Checkpoint(error) if is_refusal(error) => EXIT_REFUSED,
            Self::Launch(error) => error.exit_code(),
            _ => EXIT_FAILED,
        }
    }
}

impl LaunchError {
    /// Returns the exit code of a process whose launch has ended with this error.
    ///
    /// The code is that of [`Error::exit_code`] where the rank returned an [`Error`],
    /// [`EXIT_REFUSED`] where ranks cannot be started as the program asks, and otherwise 1.
    pub fn exit_code(&self) -> i32 {
        let refused = |error: &EngineError| match error {
            EngineError::Mpi { .. } => EXIT_FAILED,
            #[cfg(feature = "nccl")]
            EngineError::Store(_)
            | EngineError::Cuda(_)
            | EngineError::NcclJoin(_)
            | EngineError::Nccl(_) => EXIT_FAILED,
            _ => EXIT_REFUSED,
        };
        let of_rank = self.source.downcast_ref::<Error>().map(Error::exit_code);
        let of_engine = self.source.downcast_ref::<EngineError>().map(refused);
        let of_env = self.source.downcast_ref::<EnvError>().map(|_| EXIT_REFUSED);
        of_rank.or(of_engine).or(of_env).unwrap_or(EXIT_FAILED)
    }
}

/// Returns whether a program will get the error again when it saves or loads the same things.
fn is_refusal(error: &CheckpointError) -> bool {
    matches!(
        error,
        CheckpointError::Mismatch { .. }
            | CheckpointError::LaterVersion { .. }
            | CheckpointError::Filter { .. }
            | CheckpointError::NoSuchModel { .. }
            | CheckpointError::NotACheckpoint { .. }
            | CheckpointError::NotElementwise { .. }
            | CheckpointError::UnsupportedDtype { .. }
            | CheckpointError::ForeignState { .. }
            | CheckpointError::RanksDiffer { .. }
    )
}
