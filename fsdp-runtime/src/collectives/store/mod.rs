//! The store: how ranks on GPUs exchange host values, detect absent ranks, and report failures.
//!
//! Ranks that are threads of one process use a [`Hub`](super::local::Hub) directly, as on the
//! engine `local`. Ranks that are processes use the hub in the process of rank 0. Each other rank
//! has two TCP connections to that process: one for requests, on which the rank waits for other
//! ranks, and one for notices, which are answered at once. Threads of rank 0's process act at the
//! hub on behalf of the connected ranks ([`server`], [`client`]). So the same code finds and names
//! ranks that issue different collectives, come late or do not come, with threads and with
//! processes.
//!
//! A connection begins with a greeting in which both ends prove that they know the secret of the run
//! ([`secret`]). Few connections may be without one at a time ([`greeting`]).
//!
//! A connection that closes without a farewell means that its process has ended. The other ranks
//! learn this with their next notice or request. Nothing here needs a GPU.

mod channel;
mod client;
mod error;
mod greeting;
mod heartbeats;
mod host_group;
mod rendezvous;
mod secret;
mod server;
#[cfg(test)]
mod tests;
mod wire;

pub use self::error::StoreError;
pub(crate) use self::heartbeats::Heartbeats;
pub(crate) use self::host_group::HostGroup;
pub(crate) use self::rendezvous::Rendezvous;
pub(crate) use self::secret::{RunSecret, SECRET_VARIABLE};
pub use self::wire::parse_bytes as parse_store_message;
