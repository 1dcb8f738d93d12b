//! Ranks under Open MPI: one `mpirun` starts them, on all machines, and the launcher reads from its
//! output which rank printed what and how each ended.
//!
//! `mpirun` starts `fsdp rank PROGRAM` for each. That runs the program, ends it with `mpirun`, and
//! passes its lines on whole, in the form `<run> <rank> :<text>`, with `<run> <rank> !code 7` as the
//! last of one that failed: `mpirun` tags whatever pieces of a line it happens to read, and what it
//! says about a failure differs between versions and is at times left out.

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fsdp_runtime::env::RankEnv;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

use super::output::{Stream, Tail, lines, relay};
use super::plan::{LaunchError, Mpirun, Plan, RUN_ID};
use super::process::Ended;
#[cfg(target_os = "linux")]
use super::process::die_with_launcher;
use super::supervise::{AFTERMATH, SETTLING};
use crate::say;

/// How long `mpirun` may take to read the last lines of a rank that failed.
const READING: Duration = Duration::from_millis(200);

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
        .args(["-n", &plan.world.to_string(), "--bind-to", "none"])
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
    let run = std::env::var(RUN_ID).unwrap_or_default();
    let rank = match RankEnv::read() {
        Ok(Some(place)) => place.rank,
        Ok(None) => {
            say("not started by `mpirun`");
            return ExitCode::FAILURE;
        }
        Err(error) => {
            say(error);
            return ExitCode::FAILURE;
        }
    };
    let tag = format!("{run} {rank} ");
    let ended = match relayed(command, &tag) {
        Ok(ended) => ended,
        Err(source) => {
            let program = name.to_string_lossy().into_owned();
            let error = LaunchError::not_started(program, source);
            say(&error);
            Ended::Code(i32::from(error.exit_code()))
        }
    };
    let line = match ended {
        Ended::Code(0) => return ExitCode::SUCCESS,
        Ended::Code(code) => format!("{tag}!code {code}\n"),
        Ended::Signal(signal) => format!("{tag}!signal {signal}\n"),
    };
    let _ = io::stderr().write_all(line.as_bytes());
    // At a rank's failure `mpirun` drops what it has not read.
    thread::sleep(READING);
    ExitCode::from(ended.exit_code())
}

/// Runs the command, passes its lines on with a tag, and waits for both.
fn relayed(mut command: Command, tag: &str) -> io::Result<Ended> {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (sender, ended) = channel();
    if let Some(stdout) = child.stdout.take() {
        let (mut line, sender) = (tagging(io::stdout(), tag), sender.clone());
        thread::spawn(move || {
            lines(stdout, &mut line);
            let _ = sender.send(());
        });
    }
    if let Some(stderr) = child.stderr.take() {
        let mut line = tagging(io::stderr(), tag);
        thread::spawn(move || {
            lines(stderr, &mut line);
            let _ = sender.send(());
        });
    }
    let status = child.wait()?;
    // A process that the program has left behind may hold a stream open.
    let deadline = Instant::now() + AFTERMATH;
    while ended.recv_timeout(deadline.saturating_duration_since(Instant::now())).is_ok() {}
    Ok(Ended::of(status))
}

fn tagging<W: Write>(sink: W, tag: &str) -> impl FnMut(&[u8]) + use<W> {
    relay(Stream::Output, sink, format!("{tag}:"), Tail::default())
}

/// What `mpirun` has printed: its ranks' lines, and how those ended that failed.
#[derive(Clone, Debug)]
pub struct Job {
    /// Digits of the last rank.
    width: usize,
    /// What the lines of ranks begin with.
    tag: String,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Debug, Default)]
struct Seen {
    /// By rank.
    tails: Vec<Tail>,
    /// When the first failed.
    first: Option<Instant>,
    /// Those that failed before `mpirun` can have killed them.
    failed: Vec<(usize, Ended)>,
    /// The one that `mpirun` is about to say more of.
    named: Option<usize>,
    /// The one that `mpirun` says failed first.
    said: Option<(usize, Ended)>,
}

impl Job {
    pub fn new(width: usize, run: &str) -> Self {
        Self { width, tag: format!("{run} "), seen: Arc::default() }
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
        match tagged(line, self.tag.as_bytes()) {
            Some((rank, Tagged::Text(text))) => {
                let prefix = format!("[rank {rank:width$}] ", width = self.width);
                relay(stream, sink, prefix, self.tail(rank))(text);
            }
            Some((rank, Tagged::Ended(ended))) => self.failure(rank, ended),
            None => {
                self.said(&String::from_utf8_lossy(line));
                relay(stream, sink, "[mpirun] ".into(), Tail::default())(line);
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

    /// A rank has failed. `mpirun` asks the others to end at once, and kills them later.
    fn failure(&self, rank: usize, ended: Ended) {
        let mut seen = self.seen();
        let first = *seen.first.get_or_insert_with(Instant::now);
        if first.elapsed() <= SETTLING {
            seen.failed.push((rank, ended));
        }
    }

    /// A line of `mpirun`'s own: those that name a rank that failed, in versions 4 and 5.
    fn said(&self, line: &str) {
        let mut seen = self.seen();
        if let Some((_, rest)) = line.split_once("noticed that process rank ") {
            let signal = rest.split_once("exited on signal ").and_then(|(_, rest)| number(rest));
            let said = number(rest).zip(signal.map(Ended::Signal));
            seen.said = seen.said.or(said.map(|(rank, ended)| (rank as usize, ended)));
        } else if let Some((_, name)) = line.split_once("Process name:") {
            let rank = name.rsplit_once(',').and_then(|(_, rest)| number(rest));
            seen.named = rank.map(|rank| rank as usize);
        } else if let Some((_, rest)) = line.split_once("Exit code:") {
            let ended = number(rest.trim_start()).map(|code| match code {
                // `fsdp rank` exits so for a program that was killed.
                129..160 => Ended::Signal(code - 128),
                code => Ended::Code(code),
            });
            seen.said = seen.said.or(seen.named.zip(ended));
        }
    }

    /// The rank that failed first, and how. One that was asked to end is none, unless all were.
    pub fn failed(&self) -> Option<(usize, Ended)> {
        let seen = self.seen();
        let asked = |ended: &Ended| *ended == Ended::Signal(SIGTERM);
        let failed = seen.failed.iter().filter(|(_, ended)| !asked(ended));
        let cause = failed.min_by_key(|(_, ended)| ended.likely_reaction());
        cause.or(seen.said.as_ref()).or(seen.failed.first()).copied()
    }

    /// The last lines of a rank.
    pub fn lines(&self, rank: usize) -> Vec<String> {
        self.tail(rank).lines()
    }
}

/// The number that a text begins with; none has more digits than a process number.
fn number(text: &str) -> Option<i32> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    text.get(..digits)?.parse().ok()
}

/// What `fsdp rank` passes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tagged<'a> {
    /// A line of the program's.
    Text(&'a [u8]),
    /// How it failed.
    Ended(Ended),
}

/// A line of `fsdp rank`'s, and its rank.
fn tagged<'a>(line: &'a [u8], tag: &[u8]) -> Option<(usize, Tagged<'a>)> {
    let line = line.strip_prefix(tag)?;
    let end = line.iter().position(|byte| *byte == b' ')?;
    // A rank is below the world's size, and no `mpirun` starts more.
    let rank = usize::from(std::str::from_utf8(&line[..end]).ok()?.parse::<u16>().ok()?);
    let (kind, text) = line[end + 1..].split_first()?;
    if *kind == b':' {
        return Some((rank, Tagged::Text(text)));
    }
    let (kind, number) = std::str::from_utf8(text).ok()?.split_once(' ')?;
    let number = number.parse().ok()?;
    match kind {
        "code" => Some((rank, Tagged::Ended(Ended::Code(number)))),
        "signal" => Some((rank, Tagged::Ended(Ended::Signal(number)))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(lines: &[&str]) -> (Job, String) {
        let (job, mut shown) = (Job::new(1, "run-1"), Vec::new());
        lines.iter().for_each(|line| job.line(Stream::Error, &mut shown, line.as_bytes()));
        (job, String::from_utf8(shown).unwrap())
    }

    #[test]
    fn lines_are_told_apart_and_kept_by_rank() {
        let (job, shown) = job(&["run-1 3 :a :b", "-----", "run-1 0 :", "run-1 x :", "run-2 0 :c"]);
        assert_eq!(
            shown,
            "[rank 3] a :b\n[mpirun] -----\n[rank 0] \n[mpirun] run-1 x :\n[mpirun] run-2 0 :c\n"
        );
        assert_eq!((job.lines(3), job.lines(0)), (vec!["a :b".into()], vec![String::new()]));
        assert!(job.lines(1).is_empty());
    }

    #[test]
    fn the_rank_that_failed_first_is_found() {
        let lines = ["run-1 0 !code 1", "run-1 1 !signal 9", "run-1 2 !signal 15"];
        let (job, shown) = job(&lines);
        assert_eq!(job.failed(), Some((1, Ended::Signal(9))));
        assert_eq!(shown, "");
    }

    #[test]
    fn what_mpirun_says_counts_where_a_rank_could_say_nothing() {
        let said = "mpirun noticed that process rank 2 with PID 0 on node vm exited on signal 9 \
                    (Killed).";
        assert_eq!(job(&[said]).0.failed(), Some((2, Ended::Signal(9))));
        assert_eq!(job(&["run-1 0 !code 7", said]).0.failed(), Some((0, Ended::Code(7))));
        let named = ["run-1 0 !signal 15", "  Process name: [[6716,1],1]", "  Exit code:    137"];
        assert_eq!(job(&named).0.failed(), Some((1, Ended::Signal(9))));
        let newer = ["   Process name: [prterun-vm-12@1,3]", "   Exit code:    101"];
        assert_eq!(job(&newer).0.failed(), Some((3, Ended::Code(101))));
        assert_eq!(job(&["mpirun was unable to launch", "Exit code: 3"]).0.failed(), None);
        assert_eq!(job(&["run-1 1 !signal 15"]).0.failed(), Some((1, Ended::Signal(15))));
        assert_eq!(job(&["run-1 0 :run-1 1 !code 7"]).0.failed(), None, "the program's own words");
    }
}
