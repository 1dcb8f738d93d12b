//! The rendezvous by which a process joins the other processes of a launch.

use std::io;
use std::net::{TcpListener, ToSocketAddrs};
use std::time::Duration;

use super::error::StoreError;
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
        let (host, port) = self.address();
        let unresolved = |error: io::Error| StoreError::Unresolved {
            host: host.clone(),
            reason: error.to_string(),
        };
        let addresses: Vec<_> =
            (self.host, self.port).to_socket_addrs().map_err(unresolved)?.collect();
        let listener = match TcpListener::bind(&*addresses) {
            // Other machines may reach this one by an address that none of its own interfaces has.
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
                TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)))
            }
            listener => listener,
        };
        listener.map_err(|error| StoreError::CannotListen { host, port, reason: error.to_string() })
    }
}
