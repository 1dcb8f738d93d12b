//! The launcher's messages about a run that did not end well.

use rustix::process::Signal;

use super::child::{Child, RankFailure};
use super::exit::{Exit, signal_name};
use crate::console;

/// Prints which rank failed first and the last lines of that rank. `stopped` are the names of the
/// children that were stopped at the time of the failure. Returns the rank, if it is known, and its
/// end, or that of `mpirun`.
pub(super) fn failure<'a>(
    child: &Child,
    exit: Exit,
    world: usize,
    stopped: impl Iterator<Item = &'a String>,
) -> (Option<RankFailure>, Exit) {
    let Some(failure) = child.rank_failure(exit) else {
        // `mpirun` has printed the reason.
        console::err(format_args!("`mpirun` failed: {exit}"));
        return (None, exit);
    };
    let RankFailure { rank, exit, last_lines, .. } = &failure;
    let exit = *exit;
    let hint = match exit {
        Exit::Signal(signal) if signal == Signal::KILL.as_raw() => {
            " (by the kernel, if the machine ran out of memory)"
        }
        _ => "",
    };
    console::err(format_args!("rank {rank} of {world} failed first: {exit}{hint}"));
    for name in stopped {
        console::err(format_args!("{name} was stopped at that time (SIGSTOP or SIGTSTP)"));
    }
    if last_lines.is_empty() {
        console::err(format_args!("rank {rank} had printed nothing"));
    } else {
        console::err(format_args!("the last lines of rank {rank}:"));
        last_lines.iter().for_each(|line| console::err(format_args!("  {line}")));
    }
    (Some(failure), exit)
}

/// Prints the children that did not end as `signal` asked them to. Returns the launcher's exit
/// code, 128 + the signal.
pub(super) fn interrupted(children: &[Child], signal: i32) -> u8 {
    console::err(format_args!("ended by {}", signal_name(signal)));
    for child in children {
        let name = &child.name;
        match child.process.exit {
            Some(exit) if exit.is_success() || exit == Exit::Signal(signal) => {}
            Some(exit) => console::err(format_args!("{name}: {exit}")),
            None => console::err(format_args!("{name} has not ended")),
        }
    }
    Exit::Signal(signal).exit_code()
}
