//! The rendezvous by which a process joins the other processes of a launch.

use std::io;
use std::net::{TcpListener, ToSocketAddrs};
use std::time::Duration;

use super::error::StoreError;
use super::secret::{RunSecret, SECRET_VARIABLE};
use crate::layout::{Rank, WorldSize};

/// Address, rank and time-out with which a process joins the other processes of a launch.
#[derive(Debug)]
pub(crate) struct Rendezvous<'a> {
    pub(crate) rank: Rank,
    pub(crate) world: WorldSize,
    /// Name or address of the machine of rank 0.
    pub(crate) host: &'a str,
    /// TCP port on which rank 0 listens.
    pub(crate) port: u16,
    /// Name of the run: rank 0 refuses ranks of other runs.
    pub(crate) run: String,
    /// Secret that all ranks of the run know.
    pub(crate) secret: RunSecret,
    /// Address at which rank 0 listens, if it is another than `host`: where other machines reach
    /// this one by an address that none of its own interfaces has.
    pub(crate) listen: Option<String>,
    /// Time for which ranks wait for each other.
    pub(crate) timeout: Duration,
    /// Whether ranks compare the sizes of collectives, and log every collective.
    pub(crate) debug: bool,
}

impl Rendezvous<'_> {
    /// Returns the host and port of rank 0, for an error.
    pub(super) fn address(&self) -> (String, u16) {
        (self.host.to_string(), self.port)
    }

    /// Listens at the address, as rank 0.
    pub(super) fn listen(&self) -> Result<TcpListener, StoreError> {
        let (host, port) = (self.listen.as_deref().unwrap_or(self.host).to_string(), self.port);
        let unresolved = |error: io::Error| StoreError::Unresolved {
            host: host.clone(),
            reason: error.to_string(),
        };
        let addresses: Vec<_> = (&*host, port).to_socket_addrs().map_err(unresolved)?.collect();
        let public = addresses.iter().any(|address| !address.ip().is_loopback());
        if public && self.secret.is_empty() {
            tracing::warn!(
                target: "fsdp",
                "rank 0 listens at {host}:{port} without a secret, so that whoever reaches the port \
                 can join the run; set {SECRET_VARIABLE} to one text on every rank"
            );
        }
        TcpListener::bind(&*addresses).map_err(|error| StoreError::CannotListen {
            host,
            port,
            reason: error.to_string(),
        })
    }
}
