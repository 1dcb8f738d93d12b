//! A process of the launcher's, a rank or `mpirun`: how it is started, told to end, and how it
//! ended.
//!
//! Each is the leader of a process group, so that what it starts ends with it, and on Linux the
//! kernel kills it when the launcher dies.

use std::fmt;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::Sender;
use std::thread;

use fsdp_runtime::env::EXIT_PEER_FAILED;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::guard::Guard;
use super::output::lines;
use super::plan::LaunchError;
use super::supervise::Event;

/// The exit code of a Rust program that panicked.
const PANIC: i32 = 101;

/// A process on this machine.
#[derive(Debug)]
pub struct Process {
    /// How it ended.
    pub ended: Option<Ended>,
    group: Pid,
    child: Child,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With an exit code.
    Code(i32),
    /// By a signal.
    Signal(i32),
}

impl Ended {
    pub fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, Some(signal)) => Self::Signal(signal),
            // `wait` reports neither for a process that is stopped, and is not asked for those.
            (None, None) => Self::Code(1),
        }
    }

    /// Whether it ended well.
    pub fn is_success(self) -> bool {
        self == Self::Code(0)
    }

    /// How likely it is that the process ended so because another had: one that loses its peers
    /// returns an error, and neither panics nor is killed.
    pub fn likely_reaction(self) -> u8 {
        match self {
            Self::Signal(signal) if signal != Signal::ABORT.as_raw() => 0,
            Self::Signal(_) | Self::Code(PANIC) => 1,
            Self::Code(EXIT_PEER_FAILED) => 3,
            Self::Code(_) => 2,
        }
    }

    /// The exit code as `sh` has it: 128 + the signal.
    pub fn exit_code(self) -> u8 {
        let code = match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        };
        u8::try_from(code).unwrap_or(1)
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "killed by {}", signal_name(*signal)),
        }
    }
}

/// `SIGTERM`, or a number.
pub fn signal_name(signal: i32) -> String {
    match signal_hook::low_level::signal_name(signal) {
        Some(name) => name.to_string(),
        None => format!("signal {signal}"),
    }
}

impl Process {
    /// Starts `command` as the launcher's process `index`. Its lines go to `output` and `error`; its
    /// end, and the ends of its two streams, arrive as events. To be called from the main thread,
    /// whose end the kernel takes for the launcher's.
    pub fn start(
        mut command: Command,
        index: usize,
        output: impl FnMut(&[u8]) + Send + 'static,
        error: impl FnMut(&[u8]) + Send + 'static,
        guard: &Guard,
        events: &Sender<Event>,
    ) -> Result<Self, LaunchError> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        #[cfg(target_os = "linux")]
        die_with_launcher(&mut command);
        guard.adopt(&mut command);
        let mut child = command.spawn().map_err(|source| {
            LaunchError::not_started(command.get_program().to_string_lossy().into_owned(), source)
        })?;
        let group = Pid::from_child(&child);
        if let Some(stdout) = child.stdout.take() {
            read(stdout, output, events);
        }
        if let Some(stderr) = child.stderr.take() {
            read(stderr, error, events);
        }
        let events = events.clone();
        thread::spawn(move || {
            // Left a zombie, so that its number stays its own until the main thread has noted it.
            let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(group), ended) {}
            let _ = events.send(Event::Ended { index });
        });
        Ok(Self { ended: None, group, child })
    }

    /// The process group.
    pub fn group(&self) -> Pid {
        self.group
    }

    /// Sends a signal to the process and what it has started, if it has not ended.
    pub fn signal(&self, signal: Signal) {
        if self.ended.is_none() {
            let _ = kill_process_group(self.group, signal);
        }
    }

    /// Asks the process to end; one that is stopped continues to hear it.
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
        self.signal(Signal::CONT);
    }

    /// Takes note of the end of the process, and ends what it has left behind.
    pub fn reap(&mut self) -> io::Result<Ended> {
        self.signal(Signal::KILL);
        let ended = Ended::of(self.child.wait()?);
        self.ended = Some(ended);
        Ok(ended)
    }

    /// Whether the process is stopped, as by SIGSTOP; Linux only.
    pub fn is_stopped(&self) -> bool {
        let number = self.group.as_raw_nonzero();
        let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).unwrap_or_default();
        // The state follows the program's name, which is in parentheses and may hold any of them.
        let state = stat.rsplit_once(')').map_or("", |(_, rest)| rest.trim_start());
        self.ended.is_none() && state.starts_with('T')
    }
}

fn read(
    source: impl io::Read + Send + 'static,
    line: impl FnMut(&[u8]) + Send + 'static,
    events: &Sender<Event>,
) {
    let events = events.clone();
    thread::spawn(move || {
        lines(source, line);
        let _ = events.send(Event::StreamEnded);
    });
}

/// Has the kernel kill the command's process when this one dies.
#[cfg(target_os = "linux")]
pub fn die_with_launcher(command: &mut Command) {
    let launcher = rustix::process::getpid();
    let ask = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // The launcher may have died before the kernel was asked.
        if rustix::process::getppid() == Some(launcher) {
            Ok(())
        } else {
            Err(io::Error::other("the launcher has died"))
        }
    };
    // SAFETY: between fork and exec, `ask` makes two system calls and allocates nothing unless it
    // fails, when this process ends without running the program.
    unsafe { command.pre_exec(ask) };
}
