//! The supervisor of one attempt: starts the ranks, waits for events, and ends the ranks that are
//! left. `attempts.rs` decides whether another attempt follows.
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

use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::child::Child;
use super::error::LaunchError;
use super::events::{DRAIN_TIMEOUT, Event, SETTLE_TIME};
use super::exit::{Exit, signal_name};
use super::plan::LaunchPlan;
use super::process::Spawner;
use super::report;
use super::restarts::Cause;
use super::session::{Session, is_users};
use crate::console;

/// How an attempt has ended.
#[derive(Debug)]
pub(super) enum Outcome {
    /// All ranks have ended well.
    Success,
    /// A signal to the launcher has ended the ranks. The launcher's exit code follows.
    Interrupted(u8),
    /// A rank has failed.
    Failed(Failure),
}

/// The failure of an attempt.
#[derive(Debug)]
pub(super) struct Failure {
    /// The launcher's exit code, if no other attempt follows.
    pub(super) code: u8,
    pub(super) cause: Cause,
    /// Names of the processes that have not ended although they were killed.
    pub(super) left: Vec<String>,
    /// Whether the launcher has received a signal to end.
    pub(super) interrupted: bool,
}

/// Starts the ranks and waits for them. `grace` is the time between SIGTERM and SIGKILL when a rank
/// has failed.
pub(super) fn run(
    session: &mut Session,
    plan: &LaunchPlan,
    program: &[String],
    grace: Duration,
) -> Result<Outcome, LaunchError> {
    let mut supervisor = Supervisor::new(plan, grace, session);
    for index in 0..plan.processes() {
        let Session { guard, sender, .. } = &*supervisor.session;
        let spawner = Spawner { guard, events: sender, attempt: plan.attempt };
        let child = Child::start(plan, index, program, grace, spawner)?;
        supervisor.children.push(child);
    }
    supervisor.wait()?;
    supervisor.drain_output();
    Ok(supervisor.outcome())
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

struct Supervisor<'a> {
    /// Number of the attempt, counted from 0.
    attempt: usize,
    /// Time at which the attempt began.
    started: Instant,
    /// Number of ranks on all machines.
    world: usize,
    /// Time between SIGTERM and SIGKILL.
    grace: Duration,
    session: &'a mut Session,
    /// The ranks, or `mpirun` alone.
    children: Vec<Child>,
    phase: Phase,
    /// Indices of the children that failed before the supervisor asked any to end, in the order of
    /// their events.
    failed: Vec<usize>,
    /// Indices of the children that were stopped (SIGSTOP) when a rank failed.
    stopped: Vec<usize>,
    /// Signal that asked the launcher to end.
    interrupted: Option<i32>,
    /// Number of output streams that have ended, of two for each child.
    streams_ended: usize,
}

impl<'a> Supervisor<'a> {
    fn new(plan: &LaunchPlan, grace: Duration, session: &'a mut Session) -> Self {
        Self {
            attempt: plan.attempt,
            started: Instant::now(),
            world: plan.world,
            grace,
            session,
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
            let events = &self.session.events;
            let event = match self.phase.deadline() {
                None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(deadline) => {
                    events.recv_timeout(deadline.saturating_duration_since(Instant::now()))
                }
            };
            match event {
                Ok(Event::Exited { attempt, index }) if attempt == self.attempt => {
                    self.handle_exit(index)?;
                }
                Ok(Event::StreamEnded { attempt }) if attempt == self.attempt => {
                    self.streams_ended += 1;
                }
                // An event of an earlier attempt.
                Ok(Event::Exited { .. } | Event::StreamEnded { .. }) => {}
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
        self.session.guard.unwatch(process.group());
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
        if is_users(number) {
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
        let children = self.children.iter().enumerate();
        let stopped = children.filter(|(_, child)| child.process.is_stopped());
        self.stopped = stopped.map(|(index, _)| index).collect();
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
            let remaining = deadline.saturating_duration_since(Instant::now());
            match self.session.events.recv_timeout(remaining) {
                Ok(Event::StreamEnded { attempt }) if attempt == self.attempt => {
                    self.streams_ended += 1;
                }
                // A signal that arrives after the end of the ranks prevents a restart.
                Ok(Event::Signal(signal)) if !is_users(signal) => self.interrupted = Some(signal),
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }

    /// Prints how the attempt has failed or was interrupted, and returns how it has ended.
    fn outcome(&self) -> Outcome {
        let lasted = self.started.elapsed();
        let left = self.children.iter().filter(|child| child.process.exit.is_none());
        let left = left.map(|child| child.name.clone()).collect();
        let interrupted = self.interrupted.is_some();
        let failed = |code, cause| Outcome::Failed(Failure { code, cause, left, interrupted });
        if let Some((child, exit)) = self.first_failure() {
            let stopped = self.stopped.iter().map(|index| &self.children[*index].name);
            let (failure, exit) = report::failure(child, exit, self.world, stopped);
            let failed_rank = failure.as_ref().map(|failure| failure.local_rank);
            let what = failure.map_or(child.name.clone(), |failure| {
                format!("rank {} of {}", failure.rank, self.world)
            });
            let cause = Cause {
                what: format!("{what}: {exit}"),
                // A stopped rank is what the others have waited for.
                local_rank: self.stopped.first().copied().or(failed_rank),
                lasted,
                is_refusal: exit.is_refusal(),
            };
            return failed(exit.exit_code(), cause);
        }
        if self.children.iter().all(|child| child.process.exit.is_some_and(Exit::is_success)) {
            return Outcome::Success;
        }
        match self.interrupted {
            Some(signal) => Outcome::Interrupted(report::interrupted(&self.children, signal)),
            None => {
                let what = "the ranks have not ended".into();
                failed(1, Cause { what, local_rank: None, lasted, is_refusal: true })
            }
        }
    }
}

impl Drop for Supervisor<'_> {
    /// Kills the ranks that were started before one could not be started.
    fn drop(&mut self) {
        self.children.iter().for_each(|child| child.process.signal(Signal::KILL));
    }
}
