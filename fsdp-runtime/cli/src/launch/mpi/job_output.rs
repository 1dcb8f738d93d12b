//! The output of `mpirun`: the lines of its ranks, and how the failed ranks ended.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use signal_hook::consts::SIGTERM;

use super::message::{self, Message};
use crate::launch::events::SETTLE_TIME;
use crate::launch::exit::Exit;
use crate::launch::output::{Stream, Tail, forward_to};

/// Reads the output of `mpirun`, forwards it, and remembers the failures in it. Clones share one
/// state, one clone for each stream.
#[derive(Clone, Debug)]
pub(in crate::launch) struct JobOutput {
    /// Number of digits of the last rank, to align the ranks in front of lines.
    width: usize,
    /// Start of the messages of this run.
    run_prefix: String,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// Last lines of each rank, by rank.
    tails: Vec<Tail>,
    /// Time of the first failure.
    first_failure: Option<Instant>,
    /// Failed ranks, in the order of their messages, without the ranks that `mpirun` may have
    /// killed.
    failed: Vec<(usize, Exit)>,
    /// Rank in the last `Process name:` line of `mpirun`, to which its next `Exit code:` line
    /// belongs.
    named: Option<usize>,
    /// Rank that failed first, according to `mpirun`.
    named_first: Option<(usize, Exit)>,
}

impl JobOutput {
    /// Creates the state of a job without output yet. `width` is the number of digits of the last
    /// rank; `run` is the value of `FSDP_RUN_ID`; `tails` are those of the ranks.
    pub(in crate::launch) fn new(width: usize, run: &str, tails: Vec<Tail>) -> Self {
        let state = Arc::new(Mutex::new(State { tails, ..State::default() }));
        Self { width, run_prefix: message::run_prefix(run), state }
    }

    /// Returns a function that takes the lines of one of the streams of `mpirun`.
    pub(in crate::launch) fn reader(
        &self,
        stream: Stream,
    ) -> impl FnMut(&[u8]) + Send + 'static + use<> {
        let job = self.clone();
        move |line| match stream {
            Stream::Stdout => job.read(stream, io::stdout(), line),
            Stream::Stderr => job.read(stream, io::stderr(), line),
        }
    }

    fn read(&self, stream: Stream, sink: impl Write, line: &[u8]) {
        match message::parse(line, &self.run_prefix) {
            Some((rank, Message::Line(text))) => {
                let prefix = format!("[rank {rank:width$}] ", width = self.width);
                forward_to(stream, sink, prefix, self.tail(rank))(text);
            }
            Some((rank, Message::Failed(exit))) => self.rank_failed(rank, exit),
            None => {
                self.read_mpirun_line(&String::from_utf8_lossy(line));
                forward_to(stream, sink, "[mpirun] ".into(), Tail::default())(line);
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tail(&self, rank: usize) -> Tail {
        let mut state = self.state();
        if state.tails.len() <= rank {
            state.tails.resize_with(rank + 1, Tail::default);
        }
        state.tails[rank].clone()
    }

    /// Records a failure, unless it comes so late that `mpirun` may have caused it: `mpirun` asks
    /// the other ranks to end at the first failure, and kills them later.
    fn rank_failed(&self, rank: usize, exit: Exit) {
        let mut state = self.state();
        let first = *state.first_failure.get_or_insert_with(Instant::now);
        if first.elapsed() <= SETTLE_TIME {
            state.failed.push((rank, exit));
        }
    }

    /// Looks for the failed rank in a line of `mpirun` itself, in the wording of versions 4 and 5.
    /// The first rank that `mpirun` names is kept.
    fn read_mpirun_line(&self, line: &str) {
        let mut state = self.state();
        if let Some((_, rest)) = line.split_once("noticed that process rank ") {
            let signal =
                rest.split_once("exited on signal ").and_then(|(_, rest)| leading_number(rest));
            let failed = leading_number(rest).zip(signal.map(Exit::Signal));
            let failed = failed.map(|(rank, exit)| (rank as usize, exit));
            state.named_first = state.named_first.or(failed);
        } else if let Some((_, name)) = line.split_once("Process name:") {
            let rank = name.rsplit_once(',').and_then(|(_, rest)| leading_number(rest));
            state.named = rank.map(|rank| rank as usize);
        } else if let Some((_, rest)) = line.split_once("Exit code:") {
            let exit = leading_number(rest.trim_start()).map(|code| match code {
                // `fsdp rank` exits with 128 + the signal if the program was killed.
                129..160 => Exit::Signal(code - 128),
                code => Exit::Code(code),
            });
            state.named_first = state.named_first.or(state.named.zip(exit));
        }
    }

    /// Returns the rank that failed first, and how it ended.
    ///
    /// Ranks killed by SIGTERM count only if there is no other failure, because `mpirun` sends
    /// SIGTERM to all ranks after the first failure.
    pub(in crate::launch) fn first_failure(&self) -> Option<(usize, Exit)> {
        let state = self.state();
        let terminated = |exit: &Exit| *exit == Exit::Signal(SIGTERM);
        let failed = state.failed.iter().filter(|(_, exit)| !terminated(exit));
        let cause = failed.min_by_key(|(_, exit)| exit.likely_reaction());
        cause.or(state.named_first.as_ref()).or(state.failed.first()).copied()
    }

    /// Returns the last lines of a rank.
    pub(in crate::launch) fn last_lines(&self, rank: usize) -> Vec<String> {
        self.tail(rank).lines()
    }
}

/// Returns the number at the start of a text; `None` without digits, or for a number above
/// `i32::MAX`.
fn leading_number(text: &str) -> Option<i32> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    text.get(..digits)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(lines: &[&str]) -> (JobOutput, String) {
        let (job, mut shown) = (JobOutput::new(1, "run-1", Vec::new()), Vec::new());
        lines.iter().for_each(|line| job.read(Stream::Stderr, &mut shown, line.as_bytes()));
        (job, String::from_utf8(shown).unwrap())
    }

    #[test]
    fn lines_are_told_apart_and_kept_by_rank() {
        let (job, shown) = job(&["run-1 3 :a :b", "-----", "run-1 0 :", "run-1 x :", "run-2 0 :c"]);
        assert_eq!(
            shown,
            "[rank 3] a :b\n[mpirun] -----\n[rank 0] \n[mpirun] run-1 x :\n[mpirun] run-2 0 :c\n"
        );
        assert_eq!(
            (job.last_lines(3), job.last_lines(0)),
            (vec!["a :b".into()], vec![String::new()])
        );
        assert!(job.last_lines(1).is_empty());
    }

    #[test]
    fn the_rank_that_failed_first_is_found() {
        let lines = ["run-1 0 !code 1", "run-1 1 !signal 9", "run-1 2 !signal 15"];
        let (job, shown) = job(&lines);
        assert_eq!(job.first_failure(), Some((1, Exit::Signal(9))));
        assert_eq!(shown, "");
    }

    #[test]
    fn what_mpirun_says_counts_where_a_rank_could_say_nothing() {
        let said = "mpirun noticed that process rank 2 with PID 0 on node vm exited on signal 9 \
                    (Killed).";
        assert_eq!(job(&[said]).0.first_failure(), Some((2, Exit::Signal(9))));
        assert_eq!(job(&["run-1 0 !code 7", said]).0.first_failure(), Some((0, Exit::Code(7))));
        let named = ["run-1 0 !signal 15", "  Process name: [[6716,1],1]", "  Exit code:    137"];
        assert_eq!(job(&named).0.first_failure(), Some((1, Exit::Signal(9))));
        let newer = ["   Process name: [prterun-vm-12@1,3]", "   Exit code:    101"];
        assert_eq!(job(&newer).0.first_failure(), Some((3, Exit::Code(101))));
        assert_eq!(job(&["mpirun was unable to launch", "Exit code: 3"]).0.first_failure(), None);
        assert_eq!(job(&["run-1 1 !signal 15"]).0.first_failure(), Some((1, Exit::Signal(15))));
        assert_eq!(
            job(&["run-1 0 :run-1 1 !code 7"]).0.first_failure(),
            None,
            "the line is output of the program"
        );
    }
}
