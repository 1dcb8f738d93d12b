//! `fsdp watch PROCESS SECONDS`: kills `mpirun`, or its daemon on another machine, if it does not
//! end by itself after the failure of a rank.
//!
//! Open MPI waits for the daemons of all machines before it ends. Where the link to a machine is
//! down, `mpirun` and that machine's daemon wait for a quarter of an hour, until TCP gives up. The
//! rank that has failed is their child on the machine, and leaves this process behind.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getppid, kill_process, test_kill_process};

/// Time between two checks whether the process has ended.
const POLL: Duration = Duration::from_millis(50);

/// Starts the watch over the parent of this process, which gets `patience` to end.
pub(super) fn start(patience: Duration) -> io::Result<()> {
    let Some(parent) = getppid() else { return Ok(()) };
    Command::new(std::env::current_exe()?)
        .arg("watch")
        .arg(parent.as_raw_nonzero().to_string())
        .arg(patience.as_secs().to_string())
        // Whoever reads the output of the rank does not wait for this process.
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // The daemon kills the process group of the rank.
        .process_group(0)
        .spawn()?;
    Ok(())
}

/// Waits until the process has ended, and kills it after `patience`.
pub(in crate::launch) fn run(process: i32, patience: Duration) {
    // Process 1 is the system's. For `kill`, 0 and negative numbers stand for several processes.
    let process = Some(process).filter(|process| *process > 1).and_then(Pid::from_raw);
    let Some(process) = process else { return };
    let until = Instant::now() + patience;
    while test_kill_process(process).is_ok() {
        if Instant::now() >= until {
            let _ = kill_process(process, Signal::KILL);
            return;
        }
        thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Child;

    use super::*;

    fn sleep(seconds: &str) -> Child {
        Command::new("sleep").arg(seconds).spawn().unwrap()
    }

    #[test]
    fn a_process_that_does_not_end_is_killed() {
        use std::os::unix::process::ExitStatusExt as _;
        let mut process = sleep("30");
        run(i32::try_from(process.id()).unwrap(), Duration::from_millis(200));
        assert_eq!(process.wait().unwrap().signal(), Some(9));
    }

    #[test]
    fn a_process_that_ends_is_waited_for_no_longer() {
        let mut process = sleep("0.1");
        let number = i32::try_from(process.id()).unwrap();
        let started = Instant::now();
        let watch = thread::spawn(move || run(number, Duration::from_secs(30)));
        assert!(process.wait().unwrap().success());
        watch.join().unwrap();
        assert!(started.elapsed() < Duration::from_secs(10));
        // Numbers that stand for several processes.
        [0, -1, 1].into_iter().for_each(|number| run(number, Duration::ZERO));
    }
}
