//! Ranks under Open MPI: one `mpirun` starts them, on all machines, and the launcher reads from its
//! output which rank printed what and which failed first.
//!
//! `mpirun` starts `fsdp rank PROGRAM`, which asks the kernel to end it with `mpirun` and becomes the
//! program, so that ranks are not left when `mpirun` is killed.

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::output::{Stream, Tail, relay};
use super::plan::{LaunchError, Mpirun, Plan};
use super::process::Ended;
use crate::say;

/// Puts `mpirun` in front of the program.
pub fn command(
    plan: &Plan,
    mpirun: &Mpirun,
    program: &[String],
    grace: Duration,
) -> Result<Command, LaunchError> {
    let what = "its own path";
    let this = std::env::current_exe().map_err(|source| LaunchError::System { what, source })?;
    let mut command = Command::new("mpirun");
    command
        .args(["-n", &plan.world.to_string(), "--tag-output", "--bind-to", "none"])
        // How long `mpirun` waits between SIGTERM and SIGKILL.
        .args(["--mca", "odls_base_sigkill_timeout", &grace.as_secs().max(1).to_string()]);
    if let Some(hostfile) = &mpirun.hostfile {
        command.arg("--hostfile").arg(hostfile);
    } else if std::thread::available_parallelism().is_ok_and(|cores| plan.world > cores.get()) {
        command.arg("--oversubscribe");
    }
    for (name, value) in &plan.variables {
        command.env(name, value).args(["-x", name]);
    }
    command.arg(this).arg("rank").args(program);
    Ok(command)
}

/// `fsdp rank PROGRAM ARGS`: becomes the program, to end with the process that started it.
pub fn become_rank(program: &[OsString]) -> ExitCode {
    #[cfg(target_os = "linux")]
    if let Err(error) =
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
    {
        say(format_args!("the rank may outlive `mpirun`: {error}"));
    }
    let Some((name, args)) = program.split_first() else { return ExitCode::FAILURE };
    let source = Command::new(name).args(args).exec();
    let program = name.to_string_lossy().into_owned();
    let error = match source.kind() {
        io::ErrorKind::NotFound => LaunchError::NotFound { program },
        _ => LaunchError::CannotStart { program, source },
    };
    say(&error);
    ExitCode::from(error.exit_code())
}

/// What `mpirun` has printed: its ranks' lines, and which of them it says failed first.
#[derive(Clone, Debug)]
pub struct Job {
    /// Digits of the last rank.
    width: usize,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Debug, Default)]
struct Seen {
    /// By rank.
    tails: Vec<Tail>,
    named: Option<usize>,
    failed: Option<(usize, Ended)>,
}

impl Job {
    pub fn new(width: usize) -> Self {
        Self { width, seen: Arc::default() }
    }

    /// Reads one of `mpirun`'s streams.
    pub fn relay(&self, stream: Stream) -> impl FnMut(&[u8]) + Send + 'static {
        let job = self.clone();
        move |line| match stream {
            Stream::Output => job.line(stream, io::stdout(), line),
            Stream::Error => job.line(stream, io::stderr(), line),
        }
    }

    fn line(&self, stream: Stream, sink: impl Write, line: &[u8]) {
        match tagged(line) {
            Some((rank, text)) => {
                let prefix = format!("[rank {rank:width$}] ", width = self.width);
                relay(stream, sink, prefix, self.tail(rank))(text);
            }
            None => {
                relay(stream, sink, "[mpirun] ".into(), Tail::default())(line);
                self.said(&String::from_utf8_lossy(line));
            }
        }
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tail(&self, rank: usize) -> Tail {
        let mut seen = self.seen();
        if seen.tails.len() <= rank {
            seen.tails.resize_with(rank + 1, Tail::default);
        }
        seen.tails[rank].clone()
    }

    /// A line of `mpirun`'s own: those that name a rank that failed, in versions 4 and 5.
    fn said(&self, line: &str) {
        let mut seen = self.seen();
        if let Some((_, rest)) = line.split_once("noticed that process rank ") {
            let signal = rest.split_once("exited on signal ").and_then(|(_, rest)| number(rest));
            if let (Some(rank), Some(signal)) = (number(rest), signal) {
                seen.failed.get_or_insert((rank, Ended::Signal(signal as i32)));
            }
        } else if let Some((_, name)) = line.split_once("Process name:") {
            seen.named = name.rsplit_once(',').and_then(|(_, rest)| number(rest));
        } else if let Some((_, rest)) = line.split_once("Exit code:")
            && let (Some(rank), Some(code)) = (seen.named, number(rest.trim_start()))
        {
            seen.failed.get_or_insert((rank, Ended::Code(code as i32)));
        }
    }

    /// The rank that failed first, and how.
    pub fn failed(&self) -> Option<(usize, Ended)> {
        self.seen().failed
    }

    /// The last lines of a rank.
    pub fn lines(&self, rank: usize) -> Vec<String> {
        self.tail(rank).lines()
    }
}

/// The number that a text begins with; none has more digits than a process number.
fn number(text: &str) -> Option<usize> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    text.get(..digits)?.parse::<u32>().ok().map(|number| number as usize)
}

/// `[1,2]<stdout>:text`, a line of rank 2.
fn tagged(line: &[u8]) -> Option<(usize, &[u8])> {
    const LONGEST_TAG: usize = 64;
    let end = line.iter().take(LONGEST_TAG).position(|byte| *byte == b':')?;
    let (tag, text) = (std::str::from_utf8(&line[..end]).ok()?, &line[end + 1..]);
    let tag = tag.strip_suffix("<stdout>").or_else(|| tag.strip_suffix("<stderr>"))?;
    let (_, rank) = tag.strip_prefix('[')?.strip_suffix(']')?.split_once(',')?;
    // A rank is below the world's size, and that is a number the ranks were started by.
    rank.parse::<u16>().ok().map(|rank| (usize::from(rank), text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_name_the_rank() {
        assert_eq!(tagged(b"[1,12]<stdout>:a: b"), Some((12, &b"a: b"[..])));
        assert_eq!(tagged(b"[1,0]<stderr>:"), Some((0, &b""[..])));
        for own in ["", "-----", "[vm:123] message: x", "[1,x]<stdout>:", "Exit code:    7"] {
            assert_eq!(tagged(own.as_bytes()), None, "{own}");
        }
    }

    fn failed(lines: &[&str]) -> Option<(usize, Ended)> {
        let job = Job::new(1);
        lines.iter().for_each(|line| job.line(Stream::Error, Vec::new(), line.as_bytes()));
        job.failed()
    }

    #[test]
    fn the_rank_that_mpirun_names_is_found() {
        let signal = "mpirun noticed that process rank 2 with PID 0 on node vm exited on signal 9 \
                      (Killed).";
        assert_eq!(failed(&[signal]), Some((2, Ended::Signal(9))));
        let code = ["  Process name: [[6716,1],1]", "  Exit code:    7"];
        assert_eq!(failed(&code), Some((1, Ended::Code(7))));
        let newer = ["   Process name: [prterun-vm-12@1,3]", "   Exit code:    101"];
        assert_eq!(failed(&newer), Some((3, Ended::Code(101))));
        assert_eq!(failed(&["mpirun was unable to launch", "Exit code: 3"]), None);
        // Ranks say what they like.
        assert_eq!(failed(&["[1,0]<stderr>:Process name: [[1,1],1]", "Exit code: 7"]), None);
    }

    #[test]
    fn lines_are_kept_by_rank() {
        let job = Job::new(1);
        job.line(Stream::Output, Vec::new(), b"[1,3]<stdout>:three");
        job.line(Stream::Error, Vec::new(), b"[1,0]<stderr>:zero");
        assert_eq!((job.lines(3), job.lines(0)), (vec!["three".into()], vec!["zero".into()]));
        assert!(job.lines(1).is_empty());
    }
}
