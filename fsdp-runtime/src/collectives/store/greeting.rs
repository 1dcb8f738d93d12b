//! The connections at rank 0 that have not said who they are: how many there may be, and how long.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::net::{Shutdown, TcpStream};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use crate::error::IgnorePoison;

/// Reads from a connection until a moment, however slowly the bytes arrive.
#[derive(Debug)]
pub(super) struct Until<'a> {
    connection: &'a TcpStream,
    deadline: Instant,
}

impl<'a> Until<'a> {
    pub(super) fn new(connection: &'a TcpStream, deadline: Instant) -> Self {
        Self { connection, deadline }
    }
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.connection.set_read_timeout(Some(remaining))?;
        let mut connection = self.connection;
        connection.read(buffer)
    }
}

/// The connections that have not been admitted or refused yet.
///
/// There are at most [`limit`](Self::new) of them: a new one closes the oldest. Ranks introduce
/// themselves at once, so that idle connections, however many, keep none of them out.
#[derive(Debug)]
pub(super) struct Unknown {
    limit: usize,
    open: Mutex<(u64, VecDeque<(u64, TcpStream)>)>,
}

impl Unknown {
    /// Returns the set without connections.
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, open: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, (u64, VecDeque<(u64, TcpStream)>)> {
        self.open.lock().ignore_poison()
    }

    /// Adds a connection, and closes the oldest one if there are too many. Returns the number to
    /// [`remove`](Self::remove) it by.
    pub(super) fn add(&self, connection: &TcpStream) -> io::Result<u64> {
        let connection = connection.try_clone()?;
        let mut open = self.lock();
        open.0 += 1;
        let number = open.0;
        open.1.push_back((number, connection));
        while open.1.len() > self.limit
            && let Some((_, oldest)) = open.1.pop_front()
        {
            let _ = oldest.shutdown(Shutdown::Both);
        }
        Ok(number)
    }

    /// Removes a connection that was admitted or refused. Returns whether it was still there.
    pub(super) fn remove(&self, number: u64) -> bool {
        let mut open = self.lock();
        let at = open.1.iter().position(|(found, _)| *found == number);
        at.and_then(|at| open.1.remove(at)).is_some()
    }

    /// Closes all connections.
    pub(super) fn close(&self) {
        for (_, connection) in self.lock().1.drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// Returns the number of connections.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.lock().1.len()
    }
}
