//! The supervisor: starts the guard and the ranks, waits for events, and ends the ranks that are
//! left.
//!
//! - When a rank fails, the other ranks get SIGTERM and, after the grace period, SIGKILL.
//! - The first SIGINT, SIGTERM, SIGHUP or SIGQUIT to the launcher is forwarded to the ranks, which
//!   may take as long as they need, for example to save a checkpoint. The second one kills the
//!   ranks.
//!
//! The rank that failed first is not always the one whose end is reported first. The kernel closes
//! the connections of a killed process before it reports the end of the process. A peer that sees a
//! closed connection may end sooner. So the supervisor collects failures for a moment, and then
//! takes the one that is least likely to be a reaction to another.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use super::child::Child;
use super::error::LaunchError;
use super::events::{DRAIN_TIMEOUT, Event, SETTLE_TIME};
use super::exit::{Exit, signal_name};
use super::guard::Guard;
use super::plan::Plan;
use super::process::Spawner;
use super::report;
use crate::console;

/// Starts the ranks and waits for them. Returns the launcher's exit code. `grace` is the time
/// between SIGTERM and SIGKILL when a rank has failed.
pub(super) fn run(plan: &Plan, program: &[String], grace: Duration) -> Result<u8, LaunchError> {
    let cannot = |action| move |source| LaunchError::System { action, source };
    let (sender, events) = channel();
    forward_signals(&sender).map_err(cannot("install signal handlers"))?;
    let guard = Guard::start().map_err(cannot("start its guard process"))?;
    let mut supervisor = Supervisor::new(plan.world, grace, guard, events);
    for index in 0..plan.processes() {
        let spawner = Spawner { guard: &supervisor.guard, events: &sender };
        let child = Child::start(plan, index, program, grace, spawner)?;
        supervisor.children.push(child);
    }
    supervisor.wait()?;
    supervisor.drain_output();
    Ok(supervisor.report())
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

/// Phase of a run, with the time at which the next phase begins.
#[derive(Clone, Copy, Debug)]
enum Phase {
    /// All ranks run, or have ended well.
    Running,
    /// A rank has failed. Failures of other ranks are collected.
    Settling(Instant),
    /// Ranks have got SIGTERM.
    Terminating(Instant),
    /// Ranks have got SIGKILL.
    Killed(Instant),
}

impl Phase {
    fn deadline(self) -> Option<Instant> {
        match self {
            Self::Running => None,
            Self::Settling(deadline) | Self::Terminating(deadline) | Self::Killed(deadline) => {
                Some(deadline)
            }
        }
    }
}

struct Supervisor {
    /// Number of ranks on all machines.
    world: usize,
    /// Time between SIGTERM and SIGKILL.
    grace: Duration,
    guard: Guard,
    events: Receiver<Event>,
    /// The ranks, or `mpirun` alone.
    children: Vec<Child>,
    phase: Phase,
    /// Indices of the children that failed before the supervisor asked any to end, in the order of
    /// their events.
    failed: Vec<usize>,
    /// Names of the children that were stopped (SIGSTOP) when a rank failed.
    stopped: Vec<String>,
    /// Signal that asked the launcher to end.
    interrupted: Option<i32>,
    /// Number of output streams that have ended, of two for each child.
    streams_ended: usize,
}

impl Supervisor {
    fn new(world: usize, grace: Duration, guard: Guard, events: Receiver<Event>) -> Self {
        Self {
            world,
            grace,
            guard,
            events,
            children: Vec::new(),
            phase: Phase::Running,
            failed: Vec::new(),
            stopped: Vec::new(),
            interrupted: None,
            streams_ended: 0,
        }
    }

    /// Waits until every child has ended, or until the time for killed children has passed.
    fn wait(&mut self) -> Result<(), LaunchError> {
        while self.children.iter().any(|child| child.process.exit.is_none()) {
            let event = match self.phase.deadline() {
                None => self.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(deadline) => {
                    self.events.recv_timeout(deadline.saturating_duration_since(Instant::now()))
                }
            };
            match event {
                Ok(Event::Exited { index }) => self.handle_exit(index)?,
                Ok(Event::StreamEnded) => self.streams_ended += 1,
                Ok(Event::Signal(signal)) => self.handle_signal(signal),
                Err(_) => match self.phase {
                    Phase::Settling(_) => self.terminate(),
                    Phase::Running | Phase::Terminating(_) => self.kill(),
                    // The kernel still holds the killed processes. The launcher need not wait for
                    // it.
                    Phase::Killed(_) => return Ok(()),
                },
            }
        }
        Ok(())
    }

    fn handle_exit(&mut self, index: usize) -> Result<(), LaunchError> {
        let process = &mut self.children[index].process;
        let action = "wait for a rank";
        let exit = process.reap().map_err(|source| LaunchError::System { action, source })?;
        self.guard.unwatch(process.group());
        if exit.is_success() {
            return Ok(());
        }
        match (self.interrupted, self.phase) {
            // The rank has ended as the signal asked. Ranks that wait for it in a collective may
            // not end by themselves.
            (Some(_), Phase::Running) => {
                self.phase = Phase::Terminating(Instant::now() + self.grace);
            }
            (None, Phase::Running) => {
                self.failed.push(index);
                self.phase = Phase::Settling(Instant::now() + SETTLE_TIME);
            }
            (None, Phase::Settling(_)) => self.failed.push(index),
            _ => {}
        }
        Ok(())
    }

    fn handle_signal(&mut self, number: i32) {
        let Some(signal) = Signal::from_named_raw(number) else { return };
        if number == SIGUSR1 || number == SIGUSR2 {
            return self.children.iter().for_each(|child| child.process.signal(signal));
        }
        let name = signal_name(number);
        if self.interrupted.is_some() {
            console::err(format_args!("received {name} again; killing the ranks"));
            return self.kill();
        }
        self.interrupted = Some(number);
        console::err(format_args!(
            "forwarding {name} to the ranks; send it once more to kill the ranks"
        ));
        for child in &self.children {
            child.process.signal(signal);
            // A stopped process handles the signal only when it continues.
            child.process.signal(Signal::CONT);
        }
    }

    /// Asks the children to end after a failure.
    fn terminate(&mut self) {
        let stopped = self.children.iter().filter(|child| child.process.is_stopped());
        self.stopped = stopped.map(|child| child.name.clone()).collect();
        if let Some((child, exit)) = self.first_failure() {
            let (name, world) = (&child.name, self.world);
            console::err(format_args!("{name} of {world} failed: {exit}; ending the other ranks"));
        }
        self.children.iter().for_each(|child| child.process.terminate());
        self.phase = Phase::Terminating(Instant::now() + self.grace);
    }

    fn kill(&mut self) {
        self.children.iter().for_each(|child| child.process.signal(Signal::KILL));
        self.phase = Phase::Killed(Instant::now() + DRAIN_TIMEOUT);
    }

    /// Returns the child that failed first, and how: of the children that are least likely to have
    /// failed because another did, the one with the earliest event.
    fn first_failure(&self) -> Option<(&Child, Exit)> {
        let failed = self.failed.iter().map(|index| &self.children[*index]);
        let exits = failed.filter_map(|child| Some((child, child.process.exit?)));
        exits.min_by_key(|(_, exit)| exit.likely_reaction())
    }

    /// Waits for the last lines. The wait is limited, because a process that has left the process
    /// group of its rank may keep a stream open.
    fn drain_output(&mut self) {
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        while self.streams_ended < 2 * self.children.len() {
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Event::StreamEnded) => self.streams_ended += 1,
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }

    /// Reports how the run ended. Returns the launcher's exit code.
    fn report(&self) -> u8 {
        if let Some((child, exit)) = self.first_failure() {
            return report::failure(child, exit, self.world, &self.stopped);
        }
        if self.children.iter().all(|child| child.process.exit.is_some_and(Exit::is_success)) {
            return 0;
        }
        self.interrupted.map_or(1, |signal| report::interrupted(&self.children, signal))
    }
}

impl Drop for Supervisor {
    /// Kills the ranks that were started before one could not be started.
    fn drop(&mut self) {
        self.children.iter().for_each(|child| child.process.signal(Signal::KILL));
    }
}
