//! The rendezvous: host and port on the machine of rank 0, to which the other ranks connect.

use std::io;
use std::net::{Ipv4Addr, TcpListener, ToSocketAddrs};

use super::error::LaunchError;

/// Default port for several machines, as in Accelerate. For one machine, the system chooses a port.
const DEFAULT_PORT: u16 = 29500;

/// Returns the port of the rendezvous. On machine 0 the port must be free; `None` there, with one
/// machine, is any free port.
pub(super) fn port(port: Option<u16>, machines: usize, machine: usize) -> Result<u16, LaunchError> {
    let port = match port {
        Some(port) => port,
        None if machines == 1 => 0,
        None => DEFAULT_PORT,
    };
    if machine > 0 {
        return Ok(port);
    }
    let bound =
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).and_then(|listener| listener.local_addr());
    match bound {
        Ok(address) => Ok(address.port()),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            Err(LaunchError::PortTaken { port })
        }
        Err(source) => Err(LaunchError::Port { port, source }),
    }
}

/// Checks that the name of the host has an address.
pub(super) fn resolve(host: &str, port: u16) -> Result<(), LaunchError> {
    let unresolved = |source| LaunchError::Unresolved { host: host.into(), source };
    let mut addresses = (host, port).to_socket_addrs().map_err(unresolved)?;
    match addresses.next() {
        Some(_) => Ok(()),
        None => Err(unresolved(io::Error::other("it has no address"))),
    }
}
