//! The error of ranks that cannot form an NCCL communicator.

use crate::collectives::cuda::{CudaError, NcclError};
use crate::layout::Rank;

/// Error of ranks that cannot form an NCCL communicator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclJoinError {
    /// Two ranks that use the same GPU.
    #[error(
        "rank {first} and rank {second} use the same GPU, and NCCL needs one for each rank; start as \
         many ranks on a machine as it has GPUs, or let threads share one with the engine `local`"
    )]
    GpuShared {
        /// The lower of the two ranks.
        first: Rank,
        /// The higher of the two ranks.
        second: Rank,
    },
    /// Another rank that cannot use its GPU or its NCCL.
    #[error("rank {rank} cannot take part: {reason}")]
    PeerNotReady {
        /// Rank that cannot take part.
        rank: Rank,
        /// Error that the rank has reported.
        reason: String,
    },
    /// Ranks that have loaded different versions of NCCL.
    #[error(
        "rank {first} has NCCL {expected}, rank {rank} has NCCL {found}; install one version on every \
         machine"
    )]
    NcclDiffers {
        /// First rank of the process group.
        first: Rank,
        /// NCCL version of the first rank.
        expected: String,
        /// Rank with another version.
        rank: Rank,
        /// NCCL version of the rank that differs.
        found: String,
    },
    /// No CUDA device can be used.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// NCCL cannot be used.
    #[error(transparent)]
    Nccl(#[from] NcclError),
}
