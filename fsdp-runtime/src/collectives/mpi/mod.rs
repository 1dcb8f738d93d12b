//! The `mpi` engine: ranks are processes, started by Open MPI's `mpirun`.
//!
//! MPI moves the data. Sums are taken in Rust, in rank order, by the function that the `local`
//! engine uses: both engines get the same bits, and half precision needs no MPI type. A reduction
//! is therefore an exchange of parts (each rank receives every rank's gradient of the elements it
//! keeps) and a sum, which moves as many bytes as any reduce-scatter. On Flex, data goes from
//! tensors straight into buffer memory; on other devices, a host buffer is in between.
//!
//! Every collective begins with a rendezvous ([`control`]). Then data moves in non-blocking sends
//! and receives that are polled ([`transfer`]), so that the time-out finds and names a peer that
//! dies or hangs. [`sys`] wraps the MPI library. How a process becomes a rank, and how it ends, is
//! in `launch/process.rs`.

mod collectives;
mod control;
mod group;
mod reduce;
pub(crate) mod sys;
mod transfer;
mod wait;

pub(crate) use self::group::MpiGroup;
#[cfg(test)]
pub(super) use self::transfer::ALWAYS_STAGED;
