//! The `nccl` engine: ranks are threads or processes, and each has a GPU of its own.
//!
//! NCCL moves the data and takes the sums, on a CUDA stream of each rank's own. A collective has
//! three steps:
//!
//! 1. The ranks hold a rendezvous on the host ([`HostGroup`](super::store::HostGroup)). Ranks that
//!    issue different collectives, come late or do not come are named before any data moves. Ranks
//!    also exchange what NCCL does not carry, such as which rank has which gradient.
//! 2. CubeCL's stream is made to come after all work that was issued on the buffers, and is waited
//!    for: on the host, or by NCCL's stream ([`ready_word`]).
//! 3. NCCL runs on the buffers' addresses, and is waited for on the host before anyone reads them.
//!
//! The layers are those of cudarc: [`sys`] loads the functions, [`result`] converts their result
//! codes, and [`communicator`] makes them safe to use. [`stream`] is a rank's GPU and stream,
//! [`world`] forms the process group of all ranks, and [`reduce`] implements reductions. NCCL sums
//! f32 gradients of three or more ranks in an order of its own, not in rank order: such sums agree
//! with other engines' up to rounding.

mod collectives;
mod communicator;
mod error;
#[cfg(test)]
pub(super) mod fake;
mod group;
mod ready_word;
mod reduce;
mod result;
mod stream;
mod sys;
mod watch;
mod world;

pub use self::error::NcclJoinError;
pub(crate) use self::group::NcclGroup;
#[cfg(test)]
pub(super) use self::ready_word::ReadyWord;
#[cfg(test)]
pub(super) use self::sys::library;
