//! The launcher's life: start the guard and the ranks, wait for what happens, end what is left.
//!
//! Until a rank fails or a signal arrives, the launcher only waits. When one fails, the others are
//! asked to end (SIGTERM) and after the grace killed. A first SIGINT or SIGTERM to the launcher is
//! passed on, and ranks may take the time they need, to save a checkpoint say; the second kills.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use super::guard::Guard;
use super::plan::{LaunchError, Plan};
use super::ranks::{Ended, Rank, signal_name};
use crate::say;

/// How long killed processes and their streams are waited for.
const AFTERMATH: Duration = Duration::from_secs(2);

/// What the launcher waits for.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// A rank's process has ended.
    RankEnded {
        /// Its number on this machine.
        local: usize,
    },
    /// A rank's output or error stream has ended.
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
    for local in 0..plan.local {
        let rank = Rank::start(plan, local, program, &launch.guard, &sender)?;
        launch.ranks.push(rank);
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

struct Launch {
    world: usize,
    grace: Duration,
    guard: Guard,
    events: Receiver<Event>,
    ranks: Vec<Rank>,
    /// The rank that failed first, by its number on this machine.
    failed: Option<usize>,
    /// Ranks that were stopped when it did.
    stopped: Vec<usize>,
    /// The signal that asked the launcher to end.
    interrupted: Option<i32>,
    /// When to kill what has not ended.
    deadline: Option<Instant>,
    killed: bool,
    streams_ended: usize,
}

impl Launch {
    fn new(plan: &Plan, grace: Duration, guard: Guard, events: Receiver<Event>) -> Self {
        Self {
            world: plan.world,
            grace,
            guard,
            events,
            ranks: Vec::new(),
            failed: None,
            stopped: Vec::new(),
            interrupted: None,
            deadline: None,
            killed: false,
            streams_ended: 0,
        }
    }

    fn running(&self) -> usize {
        self.ranks.iter().filter(|rank| rank.ended.is_none()).count()
    }

    /// Waits until every rank has ended.
    fn wait(&mut self) -> Result<(), LaunchError> {
        while self.running() > 0 {
            let event = match self.deadline {
                None => self.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(deadline) => {
                    self.events.recv_timeout(deadline.saturating_duration_since(Instant::now()))
                }
            };
            match event {
                Ok(Event::RankEnded { local }) => self.rank_ended(local)?,
                Ok(Event::StreamEnded) => self.streams_ended += 1,
                Ok(Event::Signal(signal)) => self.signalled(signal),
                Err(RecvTimeoutError::Timeout) if !self.killed => self.kill(),
                // Killed, and not gone: the kernel holds them, and the launcher need not wait.
                Err(_) => break,
            }
        }
        Ok(())
    }

    fn rank_ended(&mut self, local: usize) -> Result<(), LaunchError> {
        let rank = &mut self.ranks[local];
        let what = "waiting for a rank";
        let ended = rank.reap().map_err(|source| LaunchError::System { what, source })?;
        let (number, group) = (rank.rank, rank.group());
        self.guard.remove(group);
        if ended.is_success() || self.failed.is_some() {
            return Ok(());
        }
        if self.interrupted.is_some() {
            // It has ended as it was asked to; those that wait for it in a collective may not.
            self.deadline.get_or_insert_with(|| Instant::now() + self.grace);
            return Ok(());
        }
        self.failed = Some(local);
        self.stopped =
            self.ranks.iter().filter(|rank| rank.is_stopped()).map(|rank| rank.rank).collect();
        let rest = if self.running() == 0 { "" } else { "; ending the other ranks" };
        say(format_args!("rank {number} of {} failed: {ended}{rest}", self.world));
        self.ranks.iter().for_each(Rank::terminate);
        self.deadline = Some(Instant::now() + self.grace);
        Ok(())
    }

    fn signalled(&mut self, number: i32) {
        let Some(signal) = Signal::from_named_raw(number) else { return };
        if number == SIGUSR1 || number == SIGUSR2 {
            return self.ranks.iter().for_each(|rank| rank.signal(signal));
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
        for rank in &self.ranks {
            rank.signal(signal);
            rank.signal(Signal::CONT);
        }
    }

    fn kill(&mut self) {
        self.killed = true;
        self.ranks.iter().for_each(|rank| rank.signal(Signal::KILL));
        self.deadline = Some(Instant::now() + AFTERMATH);
    }

    /// Waits for the last lines. A process that has left its rank's group may hold a stream open.
    fn drain(&mut self) {
        let deadline = Instant::now() + AFTERMATH;
        while self.streams_ended < 2 * self.ranks.len() {
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Event::StreamEnded) => self.streams_ended += 1,
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }

    /// Says how the run ended; returns the launcher's exit code.
    fn report(&self) -> u8 {
        if let Some(rank) = self.failed.map(|local| &self.ranks[local]) {
            let ended = rank.ended.unwrap_or(Ended::Code(1));
            self.report_failure(rank, ended);
            return ended.exit_code();
        }
        let well = self.ranks.iter().all(|rank| rank.ended.is_some_and(Ended::is_success));
        match self.interrupted {
            _ if well => 0,
            Some(signal) => {
                self.report_interrupted(signal);
                Ended::Signal(signal).exit_code()
            }
            None => 1,
        }
    }

    fn report_failure(&self, rank: &Rank, ended: Ended) {
        let number = rank.rank;
        let hint = match ended {
            Ended::Signal(signal) if signal == Signal::KILL.as_raw() => {
                " (by the kernel, if the machine ran out of memory)"
            }
            _ => "",
        };
        say(format_args!("rank {number} of {} failed first: {ended}{hint}", self.world));
        for stopped in &self.stopped {
            say(format_args!("rank {stopped} was stopped at that time (SIGSTOP or SIGTSTP)"));
        }
        let lines = rank.tail.lines();
        if lines.is_empty() {
            say(format_args!("rank {number} had printed nothing"));
        } else {
            say(format_args!("the last lines of rank {number}:"));
            lines.iter().for_each(|line| say(format_args!("  {line}")));
        }
    }

    /// Ranks that did not end as the signal asked.
    fn report_interrupted(&self, signal: i32) {
        say(format_args!("ended by {}", signal_name(signal)));
        for rank in &self.ranks {
            match rank.ended {
                Some(ended) if ended.is_success() || ended == Ended::Signal(signal) => {}
                Some(ended) => say(format_args!("rank {}: {ended}", rank.rank)),
                None => say(format_args!("rank {} has not ended", rank.rank)),
            }
        }
    }
}

impl Drop for Launch {
    /// Ranks that were started before one could not be.
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            if rank.ended.is_none() {
                rank.signal(Signal::KILL);
            }
        }
    }
}
