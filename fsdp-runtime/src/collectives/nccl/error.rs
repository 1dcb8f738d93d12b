//! Why ranks cannot form an NCCL communicator.

use crate::collectives::cuda::{CudaError, NcclError};
use crate::layout::Rank;

/// Ranks that cannot form an NCCL communicator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclJoinError {
    /// One GPU for two ranks.
    #[error(
        "rank {first} and rank {second} use the same GPU, and NCCL needs one for each rank; start as \
         many ranks on a machine as it has GPUs, or let threads share one with the engine `local`"
    )]
    GpuShared {
        /// One rank.
        first: Rank,
        /// The other.
        second: Rank,
    },
    /// Another rank cannot take part.
    #[error("rank {rank} cannot take part: {reason}")]
    PeerNotReady {
        /// The rank.
        rank: Rank,
        /// Its reason.
        reason: String,
    },
    /// Ranks that have loaded different versions of NCCL.
    #[error(
        "rank {first} has NCCL {expected}, rank {rank} has NCCL {found}; install one version on every \
         machine"
    )]
    NcclDiffers {
        /// One rank.
        first: Rank,
        /// Its version.
        expected: String,
        /// The other.
        rank: Rank,
        /// Its version.
        found: String,
    },
    /// No CUDA device that can be used.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// NCCL cannot be used.
    #[error(transparent)]
    Nccl(#[from] NcclError),
}
