//! A process beside the launcher that outlives it: when the launcher is killed, its ranks, and what
//! they have started, are ended all the same.
//!
//! The launcher holds the only writing end of the guard's standard input and names each rank's
//! process group on it, `+1234` when it starts and `-1234` when it has ended. The end of that input
//! is the end of the launcher, however it came about.

use std::io::{self, BufRead, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process_group};

/// The guard of this launcher.
#[derive(Debug)]
pub struct Guard {
    process: Child,
    groups: Option<ChildStdin>,
}

impl Guard {
    /// Starts the guard, in a process group of its own so that no Ctrl-C reaches it.
    pub fn start() -> io::Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .arg("guard")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        let groups = process.stdin.take();
        Ok(Self { process, groups })
    }

    /// A process group to end with the launcher.
    pub fn add(&mut self, group: Pid) {
        self.tell('+', group);
    }

    /// A process group that has ended.
    pub fn remove(&mut self, group: Pid) {
        self.tell('-', group);
    }

    fn tell(&mut self, sign: char, group: Pid) {
        // A guard that was killed leaves the launcher on its own, no worse than without one.
        if let Some(groups) = &mut self.groups {
            let _ = writeln!(groups, "{sign}{}", group.as_raw_nonzero());
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.groups.take());
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
