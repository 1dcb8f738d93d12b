//! A process beside the launcher that outlives it: when the launcher is killed, its ranks, and what
//! they have started, are ended all the same.
//!
//! The guard reads a pipe whose writing end the launcher alone keeps. Each rank names its process
//! group on it, `+1234`, before it becomes the program, and the launcher takes the name back,
//! `-1234`, when the rank has ended. The end of the pipe is the end of the launcher, however it came
//! about.

use std::io::{self, BufRead, PipeReader, PipeWriter, Write};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, getpid, kill_process_group};

/// The guard of this launcher.
#[derive(Debug)]
pub struct Guard {
    process: Child,
    names: Option<PipeWriter>,
    /// Kept open, so that writing to a guard that was killed is no error.
    _reader: PipeReader,
}

impl Guard {
    /// Starts the guard, in a process group of its own so that no Ctrl-C reaches it.
    pub fn start() -> io::Result<Self> {
        let (reader, names) = io::pipe()?;
        let process = Command::new(std::env::current_exe()?)
            .arg("guard")
            .stdin(reader.try_clone()?)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        Ok(Self { process, names: Some(names), _reader: reader })
    }

    /// Has the command's process name its group. By the time it runs, the guard knows it.
    pub fn adopt(&self, command: &mut Command) {
        let Some(names) = self.names.as_ref().map(AsRawFd::as_raw_fd) else { return };
        let name_group = move || {
            let mut line = [0; 16];
            let mut rest = line.as_mut_slice();
            writeln!(rest, "+{}", getpid().as_raw_nonzero())?;
            let unused = rest.len();
            // SAFETY: the descriptor is the launcher's, which this process has inherited.
            let names = unsafe { BorrowedFd::borrow_raw(names) };
            rustix::io::write(names, &line[..line.len() - unused])?;
            Ok(())
        };
        // SAFETY: between fork and exec, `name_group` formats a number into an array and makes two
        // system calls; it allocates nothing.
        unsafe { command.pre_exec(name_group) };
    }

    /// A process group that has ended.
    pub fn remove(&mut self, group: Pid) {
        if let Some(names) = &mut self.names {
            let _ = writeln!(names, "-{}", group.as_raw_nonzero());
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.names.take());
        let _ = self.process.wait();
    }
}

/// The guard itself.
pub fn run() {
    for group in left(io::stdin().lock()) {
        let _ = kill_process_group(group, Signal::KILL);
    }
}

/// The groups that are named and not taken back by the end of the input.
fn left(input: impl BufRead) -> Vec<Pid> {
    let mut groups = Vec::new();
    for line in input.lines().map_while(Result::ok) {
        let (sign, number) = line.split_at_checked(1).unwrap_or_default();
        // Group 1 is the system's, and 0 and below stand for several.
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
        let left = left("+100\n+200\n-100\n+300\n\n+1\n+-5\nnonsense\n".as_bytes());
        let numbers: Vec<i32> = left.iter().map(|group| group.as_raw_nonzero().get()).collect();
        assert_eq!(numbers, [200, 300]);
    }
}
