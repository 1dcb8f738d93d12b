//! A process of the launcher, a rank or `mpirun`: starting it, sending it signals, and waiting for
//! it.
//!
//! Each process is the leader of a process group, so that the processes it starts are ended with
//! it. On Linux the kernel kills the process when the launcher dies.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;
use std::thread;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::error::LaunchError;
use super::events::Event;
use super::exit::Exit;
use super::guard::Guard;
use super::output::for_each_line;

/// A process that the launcher has started.
#[derive(Debug)]
pub(super) struct Process {
    /// The end of the process; `None` while it runs.
    pub(super) exit: Option<Exit>,
    /// Process group, whose number is that of the process.
    group: Pid,
    child: Child,
}

/// Starts processes that the guard watches and whose events go to the supervisor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spawner<'a> {
    pub(super) guard: &'a Guard,
    pub(super) events: &'a Sender<Event>,
    /// Number of the attempt, which events carry.
    pub(super) attempt: usize,
}

impl Spawner<'_> {
    /// Starts `command` as the process `index` of the launcher. Each line of standard output is
    /// passed to `stdout`, each line of standard error to `stderr`. The end of the process and the
    /// ends of the two streams are sent as events.
    ///
    /// Must be called from the main thread: the kernel ends the process when the thread that
    /// started it ends, not only when the launcher does.
    pub(super) fn spawn(
        &self,
        mut command: Command,
        index: usize,
        stdout: impl FnMut(&[u8]) + Send + 'static,
        stderr: impl FnMut(&[u8]) + Send + 'static,
    ) -> Result<Process, LaunchError> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        #[cfg(target_os = "linux")]
        die_with_parent(&mut command);
        self.guard.watch(&mut command);
        let mut child = command.spawn().map_err(|source| {
            LaunchError::not_started(command.get_program().to_string_lossy().into_owned(), source)
        })?;
        let group = Pid::from_child(&child);
        if let Some(source) = child.stdout.take() {
            self.read(source, stdout);
        }
        if let Some(source) = child.stderr.take() {
            self.read(source, stderr);
        }
        self.wait(group, index);
        Ok(Process { exit: None, group, child })
    }

    /// Reads a stream in a thread.
    fn read(
        &self,
        source: impl io::Read + Send + 'static,
        line: impl FnMut(&[u8]) + Send + 'static,
    ) {
        let (events, attempt) = (self.events.clone(), self.attempt);
        thread::spawn(move || {
            for_each_line(source, line);
            let _ = events.send(Event::StreamEnded { attempt });
        });
    }

    /// Waits for the end of a process in a thread.
    fn wait(&self, process: Pid, index: usize) {
        let (events, attempt) = (self.events.clone(), self.attempt);
        thread::spawn(move || {
            // NOWAIT leaves the process a zombie, so that its number is not reused before the main
            // thread has removed it from the guard.
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(process), options) {}
            let _ = events.send(Event::Exited { attempt, index });
        });
    }
}

impl Process {
    /// Returns the process group.
    pub(super) fn group(&self) -> Pid {
        self.group
    }

    /// Sends a signal to the process and the processes it has started, unless the process has
    /// ended.
    pub(super) fn signal(&self, signal: Signal) {
        if self.exit.is_none() {
            let _ = kill_process_group(self.group, signal);
        }
    }

    /// Asks the process to end. A stopped process handles SIGTERM only after SIGCONT.
    pub(super) fn terminate(&self) {
        self.signal(Signal::TERM);
        self.signal(Signal::CONT);
    }

    /// Waits for the process, which has ended, and kills the processes that it has left behind.
    pub(super) fn reap(&mut self) -> io::Result<Exit> {
        self.signal(Signal::KILL);
        let exit = Exit::new(self.child.wait()?);
        self.exit = Some(exit);
        Ok(exit)
    }

    /// Returns whether the process is stopped, as by SIGSTOP. Always false on other systems than
    /// Linux.
    pub(super) fn is_stopped(&self) -> bool {
        let number = self.group.as_raw_nonzero();
        let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).unwrap_or_default();
        // The state follows the program's name. The name is in parentheses and may contain
        // parentheses.
        let state = stat.rsplit_once(')').map_or("", |(_, rest)| rest.trim_start());
        self.exit.is_none() && state.starts_with('T')
    }
}

/// Makes the kernel kill the process of `command` when this process dies.
#[cfg(target_os = "linux")]
pub(super) fn die_with_parent(command: &mut Command) {
    let parent = rustix::process::getpid();
    let set_death_signal = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the death signal was set.
        if rustix::process::getppid() == Some(parent) {
            Ok(())
        } else {
            Err(io::Error::other("the launcher has died"))
        }
    };
    // SAFETY: between fork and exec, `set_death_signal` makes two system calls. It allocates only
    // if it fails; the process then ends without executing the program.
    unsafe { command.pre_exec(set_death_signal) };
}
