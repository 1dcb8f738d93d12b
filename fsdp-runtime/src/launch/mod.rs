//! Starts ranks, each with a separate rayon pool and communication thread: all ranks as threads of
//! this process, or this process as one rank of several.
//!
//! Imports point one way: agree, device_panic, engine, env, error, malloc, options, worker <- location,
//! rank_thread <- threads, process <- mpi, gpus <- start.
#![cfg_attr(doc, doc = "\n[A page of the guide](crate::guide::processes) is about this module.")]

pub(crate) mod agree;
mod device_panic;
mod engine;
pub mod env;
mod error;
mod exchange;
mod exit_code;
#[cfg(feature = "nccl")]
mod gpus;
#[cfg(feature = "cube")]
mod kernel_cache;
mod location;
mod malloc;
#[cfg(feature = "mpi")]
mod mpi;
mod options;
#[cfg(any(feature = "mpi", feature = "nccl"))]
mod process;
mod rank_thread;
mod start;
mod threads;
mod worker;

#[cfg(any(feature = "cli", feature = "nccl"))]
pub use crate::collectives::cuda;

pub use self::engine::Engine;
pub use self::error::EngineError;
pub use self::exchange::ReduceOp;
#[cfg(all(test, feature = "cpu", feature = "nccl"))]
pub(crate) use self::gpus::two_ranks_on_host;
pub use self::options::{DEBUG_VARIABLE, LaunchOptions};
pub use self::start::launch;
pub use self::worker::Worker;
