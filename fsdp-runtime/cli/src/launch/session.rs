//! What all attempts of a launch share: the guard process, and the events of the processes and of
//! the signals to the launcher.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use super::error::LaunchError;
use super::events::Event;
use super::guard::Guard;

/// What all attempts of a launch share.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) guard: Guard,
    pub(super) events: Receiver<Event>,
    /// Sender of [`events`](Self::events), of which each process gets a clone.
    pub(super) sender: Sender<Event>,
}

impl Session {
    /// Starts the guard, and receives the signals to the launcher from now on.
    pub(super) fn start() -> Result<Self, LaunchError> {
        let cannot = |action| move |source| LaunchError::System { action, source };
        let (sender, events) = channel();
        forward_signals(&sender).map_err(cannot("install signal handlers"))?;
        let guard = Guard::start().map_err(cannot("start its guard process"))?;
        Ok(Self { guard, events, sender })
    }

    /// Waits for a time between two attempts. Returns the signal that asks the launcher to end, if
    /// one arrives.
    pub(super) fn wait(&self, time: Duration) -> Option<i32> {
        let deadline = Instant::now() + time;
        // Events of processes are those of earlier attempts.
        while let Ok(event) =
            self.events.recv_timeout(deadline.saturating_duration_since(Instant::now()))
        {
            if let Event::Signal(signal) = event
                && !is_users(signal)
            {
                return Some(signal);
            }
        }
        None
    }
}

/// Returns whether a signal is one that only the program knows the meaning of.
pub(super) fn is_users(signal: i32) -> bool {
    signal == SIGUSR1 || signal == SIGUSR2
}

/// Sends an event for each signal to the launcher.
fn forward_signals(events: &Sender<Event>) -> std::io::Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2])?;
    let events = events.clone();
    thread::spawn(move || {
        for signal in signals.forever() {
            let _ = events.send(Event::Signal(signal));
        }
    });
    Ok(())
}
