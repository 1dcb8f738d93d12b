//! Process groups, and the collectives that sharding needs of them.
//!
//! There are three engines: [`local`] for ranks that are threads, `mpi` for ranks that are
//! processes, and `nccl` for ranks with a GPU each, threads or processes. Ranks of `nccl` exchange
//! host values through the hub of [`local`] or over the TCP `store`.
//!
//! [`process_group`] is the interface to collectives on tensors, and [`group`] a process group of
//! any engine. [`comm`] is the communication thread, which runs a rank's collectives in issue
//! order, and [`device_work`] orders them with the rank's own operations on the device.

pub(crate) mod comm;
#[cfg(any(feature = "cli", feature = "nccl"))]
pub mod cuda;
pub(crate) mod device_work;
#[cfg(any(test, feature = "mpi", feature = "nccl"))]
mod failure;
pub(crate) mod group;
mod hub;
mod late;
pub(crate) mod local;
mod message;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
mod op;
mod process_group;
#[cfg(any(feature = "mpi", feature = "nccl"))]
mod regions;
mod split;
// Its tests need no GPU, and run without the feature.
#[cfg(any(test, feature = "nccl"))]
#[cfg_attr(not(feature = "nccl"), allow(dead_code, unused_imports))]
pub(crate) mod store;

#[cfg(test)]
mod conformance;

pub(crate) use self::op::Op;
pub(crate) use self::process_group::{ProcessGroup, Reduce, ReduceScatter};
