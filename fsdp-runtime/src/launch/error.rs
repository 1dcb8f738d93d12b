//! Errors of starting ranks.

use super::engine::Engine;
use super::env::{EnvError, Launcher};
use crate::layout::{Rank, WorldSize};

/// The reason why ranks cannot be started as requested.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// Environment variables that do not say which rank this process is.
    #[error(transparent)]
    Env(#[from] EnvError),
    /// A program that asks for another number of ranks than were started.
    #[error(
        "the program asks for {asked} ranks, but {launcher} has started {started} processes; start \
         {asked}, or ask for {started}"
    )]
    WorldMismatch {
        /// Number of ranks that the program asks for.
        asked: usize,
        /// Number of processes that were started.
        started: WorldSize,
        /// Launcher that has started the processes.
        launcher: Launcher,
    },
    /// The engine `local` in one of several processes.
    #[error(
        "the engine `local` runs all ranks as threads of one process, but {launcher} has started \
         {started}; start the program by itself, or use the engine `mpi` or `nccl`"
    )]
    SeveralProcesses {
        /// Number of processes that were started.
        started: WorldSize,
        /// Launcher that has started the processes.
        launcher: Launcher,
    },
    /// The engine `mpi` in a process that `mpirun` has not started.
    #[error(
        "the engine `mpi` runs each rank as a process; start the program with `mpirun -n {world}`"
    )]
    NotStarted {
        /// Number of ranks that the program asks for.
        world: usize,
    },
    /// An engine whose feature is not enabled in this build.
    #[error(
        "the engine `{engine}`, which these ranks need, is not part of this build; add \
         `--features {feature}` to the cargo command"
    )]
    NotCompiled {
        /// Engine that the ranks need.
        engine: Engine,
        /// Cargo feature that enables the engine.
        feature: &'static str,
    },
    /// Processes without a GPU each, in a build without MPI.
    #[error(
        "{launcher} has started {started} processes, which communicate over MPI on {device}, and \
         this build has no MPI; install Open MPI (on Debian: `apt-get install openmpi-bin \
         libopenmpi-dev libclang-dev`), add `--features mpi` to the cargo command, and start the \
         program with `fsdp launch --mpi`; or start it by itself, and its ranks are threads"
    )]
    NoMpi {
        /// Launcher that has started the processes.
        launcher: Launcher,
        /// Number of processes that were started.
        started: WorldSize,
        /// Name of the device.
        device: String,
    },
    /// Processes that were started as ranks, but not by MPI.
    #[error(
        "{launcher} has started this process as rank {rank} of {world}, but to MPI it is rank \
         {mpi_rank} of {mpi_world}; MPI's ranks are started with `mpirun -n {world}`, or `fsdp launch \
         --mpi`"
    )]
    NotJoined {
        /// Launcher that has started the process.
        launcher: Launcher,
        /// Rank that the launcher gives the process.
        rank: Rank,
        /// Number of ranks that the launcher has started.
        world: WorldSize,
        /// Rank of the process in MPI's world.
        mpi_rank: Rank,
        /// Number of ranks in MPI's world.
        mpi_world: usize,
    },
    /// An MPI library that cannot be used.
    #[error("MPI cannot be used: {reason}")]
    Mpi {
        /// Reason that the library gives.
        reason: String,
    },
    /// The engine `nccl` on a device that is not a CUDA device.
    #[error(
        "the engine `nccl` needs CUDA devices, and the device of the launch is {device}; give \
         `Device::cuda(0)`, or use the engine `local`, or `mpi` for ranks in several processes"
    )]
    NotCuda {
        /// Name of the device.
        device: String,
    },
    /// More ranks on a machine than GPUs.
    #[error(
        "{ranks} ranks on this machine need a GPU each, and it has {gpus} from index {first} on; \
         start fewer, or let threads share one with the engine `local`"
    )]
    TooFewGpus {
        /// Number of ranks on this machine.
        ranks: usize,
        /// Number of GPUs from index `first` on.
        gpus: usize,
        /// Index of the first GPU to use.
        first: usize,
    },
    /// Environment variables without the address of rank 0.
    #[error(
        "{launcher} does not say where the ranks of the engine `nccl` meet; set MASTER_ADDR to the \
         name of rank 0's machine and MASTER_PORT to a free port on it, for every rank (with `mpirun`: \
         `-x MASTER_ADDR=.. -x MASTER_PORT=..`)"
    )]
    NoMainProcess {
        /// Launcher that has started the process.
        launcher: Launcher,
    },
    /// Ranks that cannot connect to rank 0.
    #[cfg(feature = "nccl")]
    #[error(transparent)]
    Store(#[from] crate::collectives::store::StoreError),
    /// A CUDA device that cannot be used.
    #[cfg(feature = "nccl")]
    #[error(transparent)]
    Cuda(#[from] crate::collectives::cuda::CudaError),
    /// Ranks that cannot form an NCCL communicator.
    #[cfg(feature = "nccl")]
    #[error(transparent)]
    NcclJoin(#[from] crate::collectives::nccl::NcclJoinError),
    /// An NCCL library that cannot be used.
    #[cfg(feature = "nccl")]
    #[error(transparent)]
    Nccl(#[from] crate::collectives::cuda::NcclError),
}
