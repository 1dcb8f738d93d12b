//! Ranks under Open MPI: one `mpirun` starts them, on all machines, and the launcher reads from its
//! output which rank printed what and how each ended.
//!
//! `mpirun` starts `fsdp rank PROGRAM` for each. That runs the program, ends it with `mpirun`, and
//! says how it ended in a last line of its own, since what `mpirun` says differs between versions and
//! is at times left out.

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::{Command, ExitCode};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

use super::output::{Stream, Tail, relay};
use super::plan::{LaunchError, Mpirun, Plan, RUN_ID};
use super::process::Ended;
#[cfg(target_os = "linux")]
use super::process::die_with_launcher;
use super::supervise::SETTLING;
use crate::say;

/// The first word of the line in which `fsdp rank` says how its program ended.
const MARK: &str = "fsdp-rank-ended";

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

/// `fsdp rank PROGRAM ARGS`: runs the program as a rank of `mpirun`'s.
pub fn run_rank(program: &[OsString]) -> ExitCode {
    let Some((name, args)) = program.split_first() else { return ExitCode::FAILURE };
    // These are for the program, in the same process group; this process waits for what it does.
    let passed = [SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2].map(|signal| {
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false))).map(drop)
    });
    if let Some(error) = passed.into_iter().find_map(Result::err) {
        say(format_args!("signals: {error}"));
    }
    let mut command = Command::new(name);
    command.args(args);
    #[cfg(target_os = "linux")]
    {
        let signal = Some(rustix::process::Signal::KILL);
        if let Err(error) = rustix::process::set_parent_process_death_signal(signal) {
            say(format_args!("the rank may outlive `mpirun`: {error}"));
        }
        die_with_launcher(&mut command);
    }
    let ended = match command.status() {
        Ok(status) => Ended::of(status),
        Err(source) => {
            let program = name.to_string_lossy().into_owned();
            let error = LaunchError::not_started(program, source);
            say(&error);
            Ended::Code(i32::from(error.exit_code()))
        }
    };
    if !ended.is_success() {
        let run = std::env::var(RUN_ID).unwrap_or_default();
        let (kind, number) = match ended {
            Ended::Code(code) => ("code", code),
            Ended::Signal(signal) => ("signal", signal),
        };
        let _ = writeln!(io::stderr(), "{MARK} {run} {kind} {number}");
    }
    ExitCode::from(ended.exit_code())
}

/// What `mpirun` has printed: its ranks' lines, and how those ended that failed.
#[derive(Clone, Debug)]
pub struct Job {
    /// Digits of the last rank.
    width: usize,
    /// What the last line of a rank that failed begins with; no program knows it.
    mark: String,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Debug, Default)]
struct Seen {
    /// By rank.
    tails: Vec<Tail>,
    /// When the first failed.
    first: Option<Instant>,
    /// Those that failed before `mpirun` can have ended them.
    failed: Vec<(usize, Ended)>,
}

impl Job {
    pub fn new(width: usize, run: &str) -> Self {
        Self { width, mark: format!("{MARK} {run} "), seen: Arc::default() }
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
        let Some((rank, text)) = tagged(line) else {
            self.said(&String::from_utf8_lossy(line));
            return relay(stream, sink, "[mpirun] ".into(), Tail::default())(line);
        };
        let mark = self.mark.as_bytes();
        // The program's last line may have no end.
        let marked = text.windows(mark.len()).position(|part| part == mark);
        if let Some(at) = marked
            && let Some(ended) = ended(&text[at + mark.len()..])
        {
            self.failure(rank, ended);
        }
        let text = &text[..marked.unwrap_or(text.len())];
        if marked.is_none() || !text.is_empty() {
            let prefix = format!("[rank {rank:width$}] ", width = self.width);
            relay(stream, sink, prefix, self.tail(rank))(text);
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

    /// A rank has failed. `mpirun` asks the others to end at once, and kills them later.
    fn failure(&self, rank: usize, ended: Ended) {
        let mut seen = self.seen();
        let first = *seen.first.get_or_insert_with(Instant::now);
        let asked = !seen.failed.is_empty() && ended == Ended::Signal(SIGTERM);
        if !asked && first.elapsed() <= SETTLING {
            seen.failed.push((rank, ended));
        }
    }

    /// A line of `mpirun`'s own: it names a rank whose `fsdp rank` was killed.
    fn said(&self, line: &str) {
        let Some((_, rest)) = line.split_once("noticed that process rank ") else { return };
        let signal = rest.split_once("exited on signal ").and_then(|(_, rest)| number(rest));
        if let (Some(rank), Some(signal)) = (number(rest), signal)
            && self.failed().is_none()
        {
            self.failure(rank, Ended::Signal(signal as i32));
        }
    }

    /// The rank that failed first, and how.
    pub fn failed(&self) -> Option<(usize, Ended)> {
        self.seen().failed.iter().copied().min_by_key(|(_, ended)| ended.likely_reaction())
    }

    /// The last lines of a rank.
    pub fn lines(&self, rank: usize) -> Vec<String> {
        self.tail(rank).lines()
    }
}

/// `code 7` or `signal 9`.
fn ended(text: &[u8]) -> Option<Ended> {
    let (kind, number) = std::str::from_utf8(text).ok()?.trim().split_once(' ')?;
    let number = number.parse().ok()?;
    match kind {
        "code" => Some(Ended::Code(number)),
        "signal" => Some(Ended::Signal(number)),
        _ => None,
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

    fn job(lines: &[&str]) -> (Job, String) {
        let (job, mut shown) = (Job::new(1, "run-1"), Vec::new());
        lines.iter().for_each(|line| job.line(Stream::Error, &mut shown, line.as_bytes()));
        (job, String::from_utf8(shown).unwrap())
    }

    #[test]
    fn the_rank_that_failed_first_is_found() {
        let (job, shown) = job(&[
            "[1,0]<stderr>:fsdp-rank-ended run-1 code 1",
            "[1,1]<stderr>:disk fullfsdp-rank-ended run-1 signal 9",
            "[1,2]<stderr>:fsdp-rank-ended run-1 signal 15",
        ]);
        assert_eq!(job.failed(), Some((1, Ended::Signal(9))));
        assert_eq!(shown, "[rank 1] disk full\n");
        assert_eq!(job.lines(1), ["disk full"]);
    }

    #[test]
    fn what_mpirun_says_counts_where_a_rank_could_say_nothing() {
        let said = "mpirun noticed that process rank 2 with PID 0 on node vm exited on signal 9 \
                    (Killed).";
        assert_eq!(job(&[said]).0.failed(), Some((2, Ended::Signal(9))));
        let marked = "[1,0]<stderr>:fsdp-rank-ended run-1 code 7";
        assert_eq!(job(&[marked, said]).0.failed(), Some((0, Ended::Code(7))));
        assert_eq!(job(&["mpirun was unable to launch"]).0.failed(), None);
    }

    #[test]
    fn ranks_say_what_they_like() {
        let (job, shown) = job(&["[1,0]<stderr>:fsdp-rank-ended run-2 code 7", "[1,0]<stdout>:"]);
        assert_eq!(job.failed(), None);
        assert_eq!(shown, "[rank 0] fsdp-rank-ended run-2 code 7\n[rank 0] \n");
    }
}
