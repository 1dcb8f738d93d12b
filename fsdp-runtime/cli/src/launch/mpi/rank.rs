//! `fsdp rank PROGRAM ARGS`: runs the program as a rank of `mpirun`, and sends messages about it.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use fsdp_runtime::launch::env::RankEnv;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

use super::{message, watch};
use crate::console;
use crate::launch::error::LaunchError;
use crate::launch::events::DRAIN_TIMEOUT;
use crate::launch::exit::Exit;
use crate::launch::output::{Stream, Tail, for_each_line, forward_to};
use crate::launch::plan::{GRACE, LOGS, RUN_ID};

/// Time that `mpirun` gets to read the last lines of a failed rank.
const READ_TIME: Duration = Duration::from_millis(200);

/// Time that `mpirun` gets to end after the failure of a rank, beyond [`KILLS`] times the time
/// between SIGTERM and SIGKILL.
const END_TIME: Duration = Duration::from_secs(5);

/// Number of times, at most, that `mpirun` waits between SIGTERM and SIGKILL before it ends: 1 on one
/// machine, and 3.7 in a measurement on two.
const KILLS: u64 = 4;

/// Runs the program. Exits as the program does, or with 128 + the signal that killed it.
pub(in crate::launch) fn run(program: &[OsString]) -> ExitCode {
    let Some((name, args)) = program.split_first() else { return ExitCode::FAILURE };
    ignore_signals();
    let mut command = Command::new(name);
    command.args(args);
    #[cfg(target_os = "linux")]
    die_with_mpirun(&mut command);
    let rank = match RankEnv::read() {
        Ok(Some(env)) => env.rank,
        Ok(None) => {
            console::err("`fsdp rank` was not started by `mpirun`");
            return ExitCode::FAILURE;
        }
        Err(error) => {
            console::err(error);
            return ExitCode::FAILURE;
        }
    };
    let prefix = message::rank_prefix(&std::env::var(RUN_ID).unwrap_or_default(), rank);
    let logs = std::env::var_os(LOGS).filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let tail = match Tail::of_rank(rank.index(), logs.as_deref()) {
        Ok(tail) => tail,
        Err(source) => {
            let action = "write the log file of a rank";
            console::err(LaunchError::System { action, source });
            return ExitCode::FAILURE;
        }
    };
    let exit = match run_with_messages(command, &prefix, &tail) {
        Ok(exit) => exit,
        Err(source) => {
            let error = LaunchError::not_started(name.to_string_lossy().into_owned(), source);
            console::err(&error);
            Exit::Code(i32::from(error.exit_code()))
        }
    };
    if let Some(message) = message::failure(&prefix, exit) {
        let _ = io::stderr().write_all(message.as_bytes());
        let grace = std::env::var(GRACE).ok().and_then(|seconds| seconds.parse::<u64>().ok());
        let kills = Duration::from_secs(grace.unwrap_or(1).saturating_mul(KILLS));
        if let Err(error) = watch::start(END_TIME.saturating_add(kills)) {
            console::err(format_args!("`mpirun` may not end: {error}"));
        }
        // When a rank has failed, `mpirun` drops the output that it has not read yet.
        thread::sleep(READ_TIME);
    }
    ExitCode::from(exit.exit_code())
}

/// Makes this process survive signals that are meant for the program. Both are in the process group
/// to which `mpirun` sends signals, and this process waits until the program has ended.
fn ignore_signals() {
    for signal in [SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2] {
        // A handler instead of SIG_IGN, which the program would inherit.
        let handler = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)));
        if let Err(error) = handler {
            console::err(format_args!("cannot install a signal handler: {error}"));
        }
    }
}

/// Makes the kernel kill this process when `mpirun` dies, and the program when this process dies.
#[cfg(target_os = "linux")]
fn die_with_mpirun(command: &mut Command) {
    let signal = Some(rustix::process::Signal::KILL);
    if let Err(error) = rustix::process::set_parent_process_death_signal(signal) {
        console::err(format_args!("this rank may outlive `mpirun`: {error}"));
    }
    crate::launch::process::die_with_parent(command);
}

/// Runs the command, sends each line of its output as a message, and waits for the command and for
/// the end of its output.
fn run_with_messages(mut command: Command, rank_prefix: &str, tail: &Tail) -> io::Result<Exit> {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let prefix = message::line_prefix(rank_prefix);
    let (sender, ended) = channel();
    if let Some(stdout) = child.stdout.take() {
        let line = forward_to(Stream::Stdout, io::stdout(), prefix.clone(), tail.clone());
        forward(stdout, line, sender.clone());
    }
    if let Some(stderr) = child.stderr.take() {
        let line = forward_to(Stream::Stderr, io::stderr(), prefix, tail.clone());
        forward(stderr, line, sender.clone());
    }
    drop(sender);
    let status = child.wait()?;
    // The wait is limited, because a process that the program has left behind may keep a stream
    // open.
    let deadline = Instant::now() + DRAIN_TIMEOUT;
    while ended.recv_timeout(deadline.saturating_duration_since(Instant::now())).is_ok() {}
    Ok(Exit::new(status))
}

/// Passes the lines of `source` to `line` in a thread, and sends to `ended` afterwards.
fn forward(
    source: impl Read + Send + 'static,
    line: impl FnMut(&[u8]) + Send + 'static,
    ended: Sender<()>,
) {
    thread::spawn(move || {
        for_each_line(source, line);
        let _ = ended.send(());
    });
}
