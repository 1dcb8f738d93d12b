//! The start of ranks, each with a rayon pool and a communication thread of its own: all as threads of
//! this process, or this process as one of several.
//!
//! Imports point one way: agree, engine, env, error, options, worker <- location, rank_thread <- threads, process
//! <- mpi, gpus <- start.

pub(crate) mod agree;
mod engine;
pub mod env;
mod error;
#[cfg(feature = "nccl")]
mod gpus;
mod location;
#[cfg(feature = "mpi")]
mod mpi;
mod options;
#[cfg(any(feature = "mpi", feature = "nccl"))]
mod process;
mod rank_thread;
mod start;
mod threads;
mod worker;

pub use self::engine::Engine;
pub use self::error::EngineError;
pub use self::options::{DEBUG_VARIABLE, LaunchOptions};
pub use self::start::launch;
pub use self::worker::Worker;
