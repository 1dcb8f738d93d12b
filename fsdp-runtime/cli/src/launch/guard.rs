//! The guard: a second process of the launcher. When the launcher is killed, it kills the ranks and
//! the processes that they have started.
//!
//! The guard reads a pipe whose write end stays open in the launcher alone. Each rank writes its
//! process group to the pipe, `+1234`, before it executes the program. The launcher writes `-1234`
//! when the rank has ended. The pipe closes when the launcher ends, for whatever reason; the guard
//! then kills the groups that are left.

use std::io::{self, BufRead, PipeReader, PipeWriter, Write};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, getpid, kill_process_group};

/// The guard process of this launcher.
#[derive(Debug)]
pub(super) struct Guard {
    process: Child,
    /// Write end of the pipe; `None` once the guard is dropped.
    groups: Option<PipeWriter>,
    /// Read end, open in the launcher too, so that writing does not fail after the guard was
    /// killed.
    _reader: PipeReader,
}

impl Guard {
    /// Starts the guard in a process group of its own, so that Ctrl-C does not reach it.
    pub(super) fn start() -> io::Result<Self> {
        let (reader, groups) = io::pipe()?;
        let process = Command::new(std::env::current_exe()?)
            .arg("guard")
            .stdin(reader.try_clone()?)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        Ok(Self { process, groups: Some(groups), _reader: reader })
    }

    /// Makes the process of `command` write its process group to the guard before it executes the
    /// program.
    pub(super) fn watch(&self, command: &mut Command) {
        let Some(groups) = self.groups.as_ref().map(AsRawFd::as_raw_fd) else { return };
        let write_group = move || {
            let mut line = [0; 16];
            let mut rest = line.as_mut_slice();
            writeln!(rest, "+{}", getpid().as_raw_nonzero())?;
            let unused = rest.len();
            // SAFETY: this closure runs in the forked process before exec. That process has
            // inherited the descriptor from the launcher, where `self` keeps the descriptor open.
            let groups = unsafe { BorrowedFd::borrow_raw(groups) };
            rustix::io::write(groups, &line[..line.len() - unused])?;
            Ok(())
        };
        // SAFETY: between fork and exec, `write_group` formats a number into an array and makes two
        // system calls; it allocates nothing.
        unsafe { command.pre_exec(write_group) };
    }

    /// Tells the guard that a process group has ended, because its number may be reused.
    pub(super) fn unwatch(&mut self, group: Pid) {
        if let Some(groups) = &mut self.groups {
            let _ = writeln!(groups, "-{}", group.as_raw_nonzero());
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.groups.take());
        let _ = self.process.wait();
    }
}

/// Runs the guard: reads process groups from standard input, and kills those left when it closes.
pub(super) fn run() {
    for group in remaining_groups(io::stdin().lock()) {
        let _ = kill_process_group(group, Signal::KILL);
    }
}

/// Returns the groups that the input adds and does not remove.
fn remaining_groups(input: impl BufRead) -> Vec<Pid> {
    let mut groups = Vec::new();
    for line in input.lines().map_while(Result::ok) {
        let (sign, number) = line.split_at_checked(1).unwrap_or_default();
        // Group 1 is the system's. For `kill`, 0 and negative numbers stand for several groups.
        let number = number.parse::<i32>().ok().filter(|number| *number > 1);
        match (sign, number.and_then(Pid::from_raw)) {
            ("+", Some(group)) => groups.push(group),
            ("-", Some(group)) => groups.retain(|other| *other != group),
            _ => {}
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_that_have_ended_are_left_alone() {
        let left = remaining_groups("+100\n+200\n-100\n+300\n\n+1\n+-5\nnonsense\n".as_bytes());
        let numbers: Vec<i32> = left.iter().map(|group| group.as_raw_nonzero().get()).collect();
        assert_eq!(numbers, [200, 300]);
    }
}
