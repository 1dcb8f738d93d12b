//! The hosts of `mpirun`: which of them can be reached, and a file with those.
//!
//! A restart may have fewer ranks than the first start (`--num-processes MIN:MAX`). Each host of the
//! file is then tried with an `mpirun` of its own, which starts a process there as it starts a rank.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::error::LaunchError;
use crate::console;

/// Time in which a host must start a process.
const TIMEOUT: Duration = Duration::from_secs(15);
/// Time between two looks at whether a process has ended.
const POLL: Duration = Duration::from_millis(20);

/// The hosts of a file.
#[derive(Debug)]
pub(super) struct Hosts {
    /// The user's file.
    file: PathBuf,
    /// File with the hosts that can be reached, which this launcher writes.
    reduced: PathBuf,
}

/// The hosts that can be reached, and those that cannot.
#[derive(Debug)]
pub(super) struct Reachable<'a> {
    hosts: &'a Hosts,
    reached: Vec<Host>,
    lost: Vec<Host>,
}

/// A line of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Host {
    line: String,
    name: String,
    /// Number of ranks that the host takes, `slots=N`; 1 if the line has none.
    slots: usize,
}

impl Hosts {
    /// Returns the hosts of `file`. `run` is the name of the run.
    pub(super) fn new(file: PathBuf, run: Option<&str>) -> Self {
        let name = format!("fsdp-hosts-{}", run.unwrap_or_default());
        Self { file, reduced: std::env::temp_dir().join(name) }
    }

    /// Tries all hosts at once. Names those that cannot be reached.
    pub(super) fn reachable(&self) -> Result<Reachable<'_>, LaunchError> {
        let action = "read the hosts of `mpirun`";
        let text = fs::read_to_string(&self.file);
        let text = text.map_err(|source| LaunchError::System { action, source })?;
        let deadline = Instant::now() + TIMEOUT;
        let tried: Vec<_> = parse(&text).into_iter().map(|host| (try_host(&host), host)).collect();
        let (mut reached, mut lost) = (Vec::new(), Vec::new());
        for (process, host) in tried {
            match process.is_ok_and(|process| succeeds(process, deadline)) {
                true => reached.push(host),
                false => {
                    console::err(format_args!("host {} cannot be reached", host.name));
                    lost.push(host);
                }
            }
        }
        Ok(Reachable { hosts: self, reached, lost })
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.reduced);
    }
}

impl Reachable<'_> {
    /// Returns how many of `ranks` ranks the hosts take, in proportion to their slots.
    pub(super) fn share(&self, ranks: usize) -> usize {
        let slots = |hosts: &[Host]| hosts.iter().map(|host| host.slots).sum::<usize>();
        let (reached, lost) = (slots(&self.reached), slots(&self.lost));
        ranks * reached / (reached + lost).max(1)
    }

    /// Returns the error that the hosts take only `world` of at least `min` ranks.
    pub(super) fn too_few(&self, world: usize, min: usize) -> LaunchError {
        let lost: Vec<&str> = self.lost.iter().map(|host| host.name.as_str()).collect();
        let file = self.hosts.file.display().to_string();
        LaunchError::TooFewRanks { lost: lost.join(", "), file, world, min }
    }

    /// Writes a file with the hosts, and returns its path: that of the user's if none is lost.
    pub(super) fn write(&self) -> Result<PathBuf, LaunchError> {
        if self.lost.is_empty() {
            return Ok(self.hosts.file.clone());
        }
        let text: String = self.reached.iter().map(|host| format!("{}\n", host.line)).collect();
        let action = "write the hosts that can be reached";
        let written = fs::write(&self.hosts.reduced, text);
        written.map_err(|source| LaunchError::System { action, source })?;
        Ok(self.hosts.reduced.clone())
    }
}

/// Parses the lines of a host file. Comments begin with `#`.
fn parse(text: &str) -> Vec<Host> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    let host = |line: &str| {
        let mut words = line.split_whitespace();
        let name = words.next()?.to_string();
        let slots = words.find_map(|word| word.strip_prefix("slots=")?.parse().ok());
        Some(Host { line: line.into(), name, slots: slots.unwrap_or(1) })
    };
    lines.filter_map(host).collect()
}

/// Starts a process on a host that ends at once.
fn try_host(host: &Host) -> std::io::Result<Child> {
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--host", &format!("{}:1", host.name), "-n", "1", "true"]).process_group(0);
    mpirun.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
}

/// Returns whether a process ends well before `deadline`, at which it is killed.
fn succeeds(mut process: Child, deadline: Instant) -> bool {
    loop {
        match process.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(POLL),
            _ => {
                let _ = kill_process_group(Pid::from_child(&process), Signal::KILL);
                let _ = process.wait();
                return false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(line: &str) -> Host {
        parse(line).remove(0)
    }

    #[test]
    fn hosts_have_names_and_slots() {
        let text = "# all\nnode0 slots=4 max_slots=8\n\n  node1  # spare\nnode2 slots=2\n";
        let found: Vec<_> = parse(text).into_iter().map(|host| (host.name, host.slots)).collect();
        assert_eq!(found, [("node0".into(), 4), ("node1".into(), 1), ("node2".into(), 2)]);
        assert_eq!(host("node0 slots=4 # x").line, "node0 slots=4");
    }

    #[test]
    fn ranks_are_shared_out_by_slots() {
        let hosts = Hosts::new("hosts".into(), None);
        let reachable = |reached: &[&str], lost: &[&str]| Reachable {
            hosts: &hosts,
            reached: reached.iter().map(|line| host(line)).collect(),
            lost: lost.iter().map(|line| host(line)).collect(),
        };
        assert_eq!(reachable(&["a slots=2", "b slots=2"], &[]).share(4), 4);
        assert_eq!(reachable(&["a slots=2"], &["b slots=2"]).share(4), 2);
        assert_eq!(reachable(&["a"], &["b", "c"]).share(8), 2);
        assert_eq!(reachable(&[], &["b"]).share(8), 0);
        let text = reachable(&[], &["b", "c"]).too_few(0, 2).to_string();
        assert!(text.contains("b, c cannot be reached") && text.contains("at least 2"), "{text}");
    }
}
