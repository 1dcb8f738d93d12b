//! The `nccl` engine: ranks are threads or processes, and each has a GPU of its own.
//!
//! NCCL moves the data and takes the sums, on CubeCL's stream of the thread that runs the collectives.
//! A collective has three steps:
//!
//! 1. The ranks hold a rendezvous on the host ([`HostGroup`](super::store::HostGroup)). Ranks that
//!    issue different collectives, come late or do not come are named before any data moves. Ranks
//!    also exchange what NCCL does not carry, such as which rank has which gradient.
//! 2. CubeCL gives the buffer's address, and the stream, after all work that was issued on the buffer.
//! 3. NCCL puts the collective on that stream. Kernels and fences that follow come after it. A
//!    thread of its own watches it ([`in_flight`]). At most two collectives are there at a time, which
//!    bounds the memory that they hold.
//!
//! With [`NCCL_STREAM_VARIABLE`](super::cuda::NCCL_STREAM_VARIABLE) at `0` NCCL runs on a stream of
//! the rank's own, and the host waits before a collective and after it.
//!
//! The layers are those of cudarc: [`sys`] loads the functions, [`result`] converts their result
//! codes, and [`communicator`] makes them safe to use. [`stream`] is a rank's GPU and its streams,
//! [`world`] forms the process group of all ranks, and [`reduce`] implements reductions. NCCL sums
//! f32 gradients of three or more ranks in an order of its own, not in rank order: such sums agree
//! with other engines' up to rounding.

mod collectives;
mod communicator;
mod error;
#[cfg(test)]
pub(crate) mod fake;
mod group;
mod in_flight;
mod reduce;
mod result;
mod stream;
mod sys;
mod watch;
mod world;

pub use self::error::NcclJoinError;
pub(crate) use self::group::NcclGroup;
#[cfg(test)]
pub(super) use self::in_flight::MOST as MOST_IN_FLIGHT;
#[cfg(test)]
pub(super) use self::sys::library;
