//! The launcher's life: start the guard and the ranks, wait for what happens, end what is left.
//!
//! Until a rank fails or a signal arrives, the launcher only waits. When one fails, the others are
//! asked to end (SIGTERM) and after the grace killed. A first SIGINT or SIGTERM to the launcher is
//! passed on, and ranks may take the time they need, to save a checkpoint say; the second kills.
//!
//! Which rank failed first is not simply which ended first: the kernel closes the connections of a
//! killed process before it reports its end, and a peer that sees them close may be gone sooner. So
//! the launcher lets failures settle for a moment, and then looks for the one that is no reaction.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use super::guard::Guard;
use super::plan::{LaunchError, Plan};
use super::process::{Ended, signal_name};
use super::ranks::{Member, Started};
use crate::say;

/// How long after the first failure the cause may still show.
pub const SETTLING: Duration = Duration::from_millis(300);

/// How long killed processes and their streams are waited for.
pub const AFTERMATH: Duration = Duration::from_secs(2);

/// What the launcher waits for.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// A process has ended.
    Ended {
        /// Its number among the launcher's.
        index: usize,
    },
    /// A process's output or error stream has ended.
    StreamEnded,
    /// A signal has reached the launcher.
    Signal(i32),
}

/// Starts the ranks, and returns the launcher's exit code when they have ended.
pub fn run(plan: &Plan, program: &[String], grace: Duration) -> Result<u8, LaunchError> {
    let system = |what| move |source| LaunchError::System { what, source };
    let (sender, events) = channel();
    forward_signals(&sender).map_err(system("signals"))?;
    let guard = Guard::start().map_err(system("its guard"))?;
    let mut launch = Launch::new(plan, grace, guard, events);
    for index in 0..plan.processes() {
        let member = Member::start(plan, index, program, grace, &launch.guard, &sender)?;
        launch.members.push(member);
    }
    launch.wait()?;
    launch.drain();
    Ok(launch.report())
}

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

/// How far a run has come, and until when it stays so.
#[derive(Clone, Copy, Debug)]
enum Phase {
    /// Ranks run.
    Running,
    /// One has failed; others that fail may have done so before it.
    Settling(Instant),
    /// Ranks were asked to end.
    Ending(Instant),
    /// They were killed.
    Killed(Instant),
}

impl Phase {
    fn deadline(self) -> Option<Instant> {
        match self {
            Self::Running => None,
            Self::Settling(deadline) | Self::Ending(deadline) | Self::Killed(deadline) => {
                Some(deadline)
            }
        }
    }
}

struct Launch {
    world: usize,
    grace: Duration,
    guard: Guard,
    events: Receiver<Event>,
    /// The ranks, or `mpirun` alone.
    members: Vec<Member>,
    phase: Phase,
    /// Processes that failed before any was asked to end, in that order, by their number here.
    failed: Vec<usize>,
    /// Names of those that were stopped then.
    stopped: Vec<String>,
    /// The signal that asked the launcher to end.
    interrupted: Option<i32>,
    streams_ended: usize,
}

impl Launch {
    fn new(plan: &Plan, grace: Duration, guard: Guard, events: Receiver<Event>) -> Self {
        Self {
            world: plan.world,
            grace,
            guard,
            events,
            members: Vec::new(),
            phase: Phase::Running,
            failed: Vec::new(),
            stopped: Vec::new(),
            interrupted: None,
            streams_ended: 0,
        }
    }

    fn running(&self) -> usize {
        self.members.iter().filter(|member| member.process.ended.is_none()).count()
    }

    /// Waits until every rank has ended.
    fn wait(&mut self) -> Result<(), LaunchError> {
        while self.running() > 0 {
            let event = match self.phase.deadline() {
                None => self.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(deadline) => {
                    self.events.recv_timeout(deadline.saturating_duration_since(Instant::now()))
                }
            };
            match event {
                Ok(Event::Ended { index }) => self.ended(index)?,
                Ok(Event::StreamEnded) => self.streams_ended += 1,
                Ok(Event::Signal(signal)) => self.signalled(signal),
                Err(_) => match self.phase {
                    Phase::Settling(_) => self.end(),
                    Phase::Running | Phase::Ending(_) => self.kill(),
                    // Killed, and not gone: the kernel holds them, and the launcher need not wait.
                    Phase::Killed(_) => return Ok(()),
                },
            }
        }
        Ok(())
    }

    fn ended(&mut self, index: usize) -> Result<(), LaunchError> {
        let process = &mut self.members[index].process;
        let what = "waiting for a rank";
        let ended = process.reap().map_err(|source| LaunchError::System { what, source })?;
        self.guard.remove(process.group());
        if ended.is_success() {
            return Ok(());
        }
        match (self.interrupted, self.phase) {
            // It has ended as it was asked to; those that wait for it in a collective may not.
            (Some(_), Phase::Running) => self.phase = Phase::Ending(Instant::now() + self.grace),
            (None, Phase::Running) => {
                self.failed.push(index);
                self.phase = Phase::Settling(Instant::now() + SETTLING);
            }
            (None, Phase::Settling(_)) => self.failed.push(index),
            _ => {}
        }
        Ok(())
    }

    /// Asks the ranks to end, as one has failed.
    fn end(&mut self) {
        let stopped = self.members.iter().filter(|member| member.process.is_stopped());
        self.stopped = stopped.map(|member| member.name.clone()).collect();
        if let Some((member, ended)) = self.cause() {
            let (name, world) = (&member.name, self.world);
            say(format_args!("{name} of {world} failed: {ended}; ending the other ranks"));
        }
        self.members.iter().for_each(|member| member.process.terminate());
        self.phase = Phase::Ending(Instant::now() + self.grace);
    }

    /// The process that failed first, and how: the earliest of those that are least likely to have
    /// failed because another did.
    fn cause(&self) -> Option<(&Member, Ended)> {
        let failed = self.failed.iter().map(|index| &self.members[*index]);
        let ended = failed.filter_map(|member| Some((member, member.process.ended?)));
        ended.min_by_key(|(_, ended)| ended.likely_reaction())
    }

    fn signalled(&mut self, number: i32) {
        let Some(signal) = Signal::from_named_raw(number) else { return };
        if number == SIGUSR1 || number == SIGUSR2 {
            return self.members.iter().for_each(|member| member.process.signal(signal));
        }
        if self.interrupted.is_some() {
            say(format_args!("{} again; killing the ranks", signal_name(number)));
            return self.kill();
        }
        self.interrupted = Some(number);
        say(format_args!(
            "{} is passed on to the ranks; once more kills them",
            signal_name(number)
        ));
        for member in &self.members {
            member.process.signal(signal);
            member.process.signal(Signal::CONT);
        }
    }

    fn kill(&mut self) {
        self.members.iter().for_each(|member| member.process.signal(Signal::KILL));
        self.phase = Phase::Killed(Instant::now() + AFTERMATH);
    }

    /// Waits for the last lines. A process that has left its rank's group may hold a stream open.
    fn drain(&mut self) {
        let deadline = Instant::now() + AFTERMATH;
        while self.streams_ended < 2 * self.members.len() {
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Event::StreamEnded) => self.streams_ended += 1,
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }

    /// Says how the run ended; returns the launcher's exit code.
    fn report(&self) -> u8 {
        if let Some((member, ended)) = self.cause() {
            return self.report_failure(&member.started, ended);
        }
        let ended_well = |member: &Member| member.process.ended.is_some_and(Ended::is_success);
        match self.interrupted {
            _ if self.members.iter().all(ended_well) => 0,
            Some(signal) => {
                self.report_interrupted(signal);
                Ended::Signal(signal).exit_code()
            }
            None => 1,
        }
    }

    fn report_failure(&self, started: &Started, ended: Ended) -> u8 {
        let world = self.world;
        let (name, ended, lines) = match started {
            Started::Rank { rank, tail } => (format!("rank {rank}"), ended, tail.lines()),
            Started::Mpirun(job) => match job.failed() {
                Some((rank, ended)) => (format!("rank {rank}"), ended, job.lines(rank)),
                // It says itself, in its own lines, what kept it from starting ranks.
                None => {
                    say(format_args!("`mpirun` failed: {ended}"));
                    return ended.exit_code();
                }
            },
        };
        let hint = match ended {
            Ended::Signal(signal) if signal == Signal::KILL.as_raw() => {
                " (by the kernel, if the machine ran out of memory)"
            }
            _ => "",
        };
        say(format_args!("{name} of {world} failed first: {ended}{hint}"));
        for stopped in &self.stopped {
            say(format_args!("{stopped} was stopped at that time (SIGSTOP or SIGTSTP)"));
        }
        if lines.is_empty() {
            say(format_args!("{name} had printed nothing"));
        } else {
            say(format_args!("the last lines of {name}:"));
            lines.iter().for_each(|line| say(format_args!("  {line}")));
        }
        ended.exit_code()
    }

    /// Processes that did not end as the signal asked.
    fn report_interrupted(&self, signal: i32) {
        say(format_args!("ended by {}", signal_name(signal)));
        for member in &self.members {
            let name = &member.name;
            match member.process.ended {
                Some(ended) if ended.is_success() || ended == Ended::Signal(signal) => {}
                Some(ended) => say(format_args!("{name}: {ended}")),
                None => say(format_args!("{name} has not ended")),
            }
        }
    }
}

impl Drop for Launch {
    /// Ranks that were started before one could not be.
    fn drop(&mut self) {
        self.members.iter().for_each(|member| member.process.signal(Signal::KILL));
    }
}
