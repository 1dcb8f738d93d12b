//! Why ranks cannot be started.

use super::engine::Engine;
use super::env::{EnvError, Launcher};
use crate::layout::{Rank, WorldSize};

/// Ranks that cannot be started as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// Variables of the environment that do not say which rank this process is.
    #[error(transparent)]
    Env(#[from] EnvError),
    /// The program asks for another number of ranks than were started.
    #[error(
        "the program asks for {asked} ranks, but {launcher} has started {started} processes; start \
         {asked}, or ask for {started}"
    )]
    WorldMismatch {
        /// What the program asks for.
        asked: usize,
        /// What was started.
        started: WorldSize,
        /// By what.
        launcher: Launcher,
    },
    /// Thread ranks in several processes.
    #[error(
        "the engine `local` runs all ranks as threads of one process, but {launcher} has started \
         {started}; start the program by itself, or use the engine `mpi` or `nccl`"
    )]
    SeveralProcesses {
        /// How many there are.
        started: WorldSize,
        /// What has started them.
        launcher: Launcher,
    },
    /// An engine between processes, and one process.
    #[error("the engine `mpi` runs one process a rank; start the program with `mpirun -n {world}`")]
    NotStarted {
        /// The ranks asked for.
        world: usize,
    },
    /// An engine that is not part of this build.
    #[error(
        "the engine `{engine}`, which these ranks need, is not part of this build; add \
         `--features {feature}` to the cargo command"
    )]
    NotCompiled {
        /// The engine.
        engine: Engine,
        /// The feature that brings it.
        feature: &'static str,
    },
    /// Processes that were started as ranks, but not by MPI.
    #[error(
        "{launcher} has started this process as rank {rank} of {world}, but to MPI it is rank \
         {mpi_rank} of {mpi_world}; MPI's ranks are started with `mpirun -n {world}`, or `fsdp launch \
         --mpi`"
    )]
    NotJoined {
        /// What has started the process.
        launcher: Launcher,
        /// The rank it was given.
        rank: Rank,
        /// Of how many.
        world: WorldSize,
        /// Its rank among the processes that MPI has joined.
        mpi_rank: Rank,
        /// How many these are.
        mpi_world: usize,
    },
    /// MPI cannot be used.
    #[error("MPI cannot be used: {reason}")]
    Mpi {
        /// The library's reason.
        reason: String,
    },
    /// The engine of GPUs, on another device.
    #[error(
        "the engine `nccl` needs CUDA devices, and the device of the launch is {device}; give \
         `Device::cuda(0)`, or use the engine `local`, or `mpi` for ranks in several processes"
    )]
    NotCuda {
        /// The device's name.
        device: String,
    },
    /// More ranks than GPUs.
    #[error(
        "{ranks} ranks on this machine need a GPU each, and it has {gpus} from index {first} on; \
         start fewer, or let threads share one with the engine `local`"
    )]
    TooFewGpus {
        /// The ranks on this machine.
        ranks: usize,
        /// The GPUs there are.
        gpus: usize,
        /// The first one to use.
        first: usize,
    },
    /// Nothing says where ranks meet.
    #[error(
        "{launcher} does not say where the ranks of the engine `nccl` meet; set MASTER_ADDR to the \
         name of rank 0's machine and MASTER_PORT to a free port on it, for every rank (with `mpirun`: \
         `-x MASTER_ADDR=.. -x MASTER_PORT=..`)"
    )]
    NoMainProcess {
        /// What has started the process.
        launcher: Launcher,
    },
    /// Ranks that cannot reach each other.
    #[cfg(feature = "nccl")]
    #[error(transparent)]
    Store(#[from] crate::collectives::store::StoreError),
    /// No CUDA device that can be used.
    #[cfg(feature = "nccl")]
    #[error(transparent)]
    Cuda(#[from] crate::collectives::cuda::CudaError),
    /// Ranks that cannot form an NCCL communicator.
    #[cfg(feature = "nccl")]
    #[error(transparent)]
    NcclJoin(#[from] crate::collectives::nccl::NcclJoinError),
    /// NCCL cannot be used.
    #[cfg(feature = "nccl")]
    #[error(transparent)]
    Nccl(#[from] crate::collectives::cuda::NcclError),
}
