//! Processes that an attempt has left: ranks of `mpirun` that the kernel is still ending, and
//! processes that a rank has started in a session of their own.

use std::fs;
use std::time::{Duration, Instant};

use super::events::DRAIN_TIMEOUT;
use super::plan::RUN_ID;
use crate::console;

/// Time between two looks at the processes of the machine.
const POLL: Duration = Duration::from_millis(20);

/// Waits until no process of a run is left on this machine, for a limited time. Names those that
/// stay. Does nothing on systems without `/proc`.
///
/// The kernel ends the ranks of a killed `mpirun` one after the other, and a rank of the next
/// attempt must not meet files that a rank of the last one still writes.
pub(super) fn wait_for_end(run: &str) {
    let deadline = Instant::now() + DRAIN_TIMEOUT;
    loop {
        let left = processes(run);
        if left.is_empty() {
            return;
        }
        if Instant::now() >= deadline {
            let left = left.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
            return console::err(format_args!("processes of the failed attempt still run: {left}"));
        }
        std::thread::sleep(POLL);
    }
}

/// Returns the numbers of the processes whose environment has the name of the run.
fn processes(run: &str) -> Vec<u32> {
    let variable = format!("{RUN_ID}={run}");
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let of_run = |number: &u32| {
        // A process that has ended has no environment, and neither has one of another user.
        let environ = fs::read(format!("/proc/{number}/environ")).unwrap_or_default();
        environ.split(|byte| *byte == 0).any(|entry| entry == variable.as_bytes())
    };
    numbers.filter(of_run).collect()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_processes_of_a_run_are_found_until_they_end() {
        let run = format!("test-{}", std::process::id());
        let mut child = Command::new("sleep").arg("0.3").env(RUN_ID, &run).spawn().unwrap();
        while processes(&run).is_empty() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(processes(&run), [child.id()]);
        let begun = Instant::now();
        wait_for_end(&run);
        assert!(begun.elapsed() < DRAIN_TIMEOUT);
        assert!(processes(&run).is_empty());
        child.wait().unwrap();
    }
}
