//! The policy of restarts: whether the ranks are started again after a failure, when, and without
//! which rank.

use std::fmt;
use std::time::Duration;

/// An attempt that ends sooner than this after its start has failed at once: the next restart waits
/// twice as long, and a rank that fails first in two such attempts in a row does not come back.
const SHORT: Duration = Duration::from_secs(60);

/// Longest wait before a restart, unless `--restart-backoff` is longer.
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// Number of failures that the report at the end lists.
const LISTED: usize = 10;

/// Settings of restarts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Restarts {
    /// Maximum number of restarts.
    pub(crate) max: usize,
    /// Time before the first restart.
    pub(crate) backoff: Duration,
    /// Minimum number of ranks; `None` if a restart has as many as the first start.
    pub(crate) min_processes: Option<usize>,
}

/// The failure of an attempt, as the policy sees it.
#[derive(Clone, Debug)]
pub(super) struct Cause {
    /// Description of the failure, such as `rank 1 of 4: killed by SIGKILL`.
    pub(super) what: String,
    /// Number on its machine of the rank that failed first or was stopped; `None` if it is not known.
    pub(super) local_rank: Option<usize>,
    /// Time from the start of the attempt to its end.
    pub(super) lasted: Duration,
    /// Whether the next attempt would fail in the same way.
    pub(super) is_refusal: bool,
}

/// What follows a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// All ranks are started again.
    Restart {
        /// Time to wait before.
        wait: Duration,
        /// Number of the rank that does not come back, among the ranks of the failed attempt.
        without: Option<usize>,
    },
    /// The run has failed.
    End,
}

/// The failures of a run, and the restarts that are left.
#[derive(Debug)]
pub(super) struct History {
    settings: Restarts,
    /// Number of restarts so far.
    restarts: usize,
    /// Number of attempts in a row, up to the last one, that have failed at once.
    short: u32,
    /// Rank that failed first in the last attempt, if the attempt failed at once.
    suspect: Option<usize>,
    /// Descriptions of the last [`LISTED`] failures.
    failures: Vec<String>,
}

impl History {
    /// Returns the history of a run that begins.
    pub(super) fn new(settings: Restarts) -> Self {
        Self { settings, restarts: 0, short: 0, suspect: None, failures: Vec::new() }
    }

    /// Returns the number of restarts so far.
    pub(super) fn restarts(&self) -> usize {
        self.restarts
    }

    /// Records the failure of an attempt with `world` ranks, and decides what follows.
    pub(super) fn failed(&mut self, cause: &Cause, world: usize) -> Next {
        if self.failures.len() == LISTED {
            self.failures.remove(0);
        }
        self.failures.push(cause.to_string());
        if cause.is_refusal || self.restarts == self.settings.max {
            return Next::End;
        }
        self.restarts += 1;
        let is_short = cause.lasted < SHORT;
        let wait = self.backoff();
        self.short = if is_short { self.short.saturating_add(1) } else { 0 };
        let suspect = cause.local_rank.filter(|_| is_short);
        let can_shrink = self.settings.min_processes.is_some_and(|min| world > min);
        let without = suspect.filter(|_| can_shrink && suspect == self.suspect);
        // Without the rank, the numbers of the ranks after it change.
        self.suspect = if without.is_some() { None } else { suspect };
        Next::Restart { wait, without }
    }

    fn backoff(&self) -> Duration {
        let first = self.settings.backoff;
        let doubled = first.saturating_mul(1_u32.checked_shl(self.short).unwrap_or(u32::MAX));
        doubled.min(first.max(MAX_BACKOFF))
    }

    /// Returns the lines of the report at the end of a run; none if restarts were not asked for, or
    /// if none was needed.
    pub(super) fn report(&self, succeeded: bool) -> Vec<String> {
        let Restarts { max, .. } = self.settings;
        if max == 0 || (succeeded && self.restarts == 0) {
            return Vec::new();
        }
        let times = match self.restarts {
            0 => "without a restart".into(),
            1 => "after 1 restart".into(),
            several => format!("after {several} restarts"),
        };
        let ended = if succeeded { "the run has ended well" } else { "the run has failed" };
        let mut lines = vec![format!("{ended} {times} of at most {max}")];
        let failures = self.restarts + usize::from(!succeeded);
        let first = failures.saturating_sub(self.failures.len());
        if first > 0 {
            lines.push(format!("  .. {first} earlier failures"));
        }
        let numbered = self.failures.iter().zip(first + 1..);
        lines.extend(numbered.map(|(failure, number)| format!("  failure {number}: {failure}")));
        lines
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {:.1} s after the start", self.what, self.lasted.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cause(local_rank: usize, seconds: u64) -> Cause {
        let (what, lasted) = (format!("rank {local_rank}"), Duration::from_secs(seconds));
        Cause { what, local_rank: Some(local_rank), lasted, is_refusal: false }
    }

    fn history(max: usize, min_processes: Option<usize>) -> History {
        History::new(Restarts { max, backoff: Duration::from_secs(1), min_processes })
    }

    fn restart(seconds: u64, without: Option<usize>) -> Next {
        Next::Restart { wait: Duration::from_secs(seconds), without }
    }

    #[test]
    fn restarts_are_counted_and_refusals_end_the_run() {
        let mut history = history(2, None);
        assert_eq!(history.failed(&cause(0, 100), 4), restart(1, None));
        assert_eq!(history.failed(&cause(1, 100), 4), restart(1, None));
        assert_eq!(history.failed(&cause(2, 100), 4), Next::End);
        let report = history.report(false);
        assert_eq!(report[0], "the run has failed after 2 restarts of at most 2");
        assert_eq!(report[3], "  failure 3: rank 2, 100.0 s after the start");
        let mut refused = self::history(2, None);
        let cause = Cause { is_refusal: true, ..cause(0, 0) };
        assert_eq!(refused.failed(&cause, 4), Next::End);
        assert!(refused.report(false)[0].contains("without a restart"));
    }

    #[test]
    fn the_wait_doubles_after_failures_at_once() {
        let mut history = history(100, None);
        let mut wait = |seconds| match history.failed(&cause(0, seconds), 4) {
            Next::Restart { wait, .. } => wait.as_secs(),
            Next::End => panic!(),
        };
        let waits: Vec<u64> = (0..8).map(|_| wait(1)).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!((0..60).map(|_| wait(1)).max(), Some(60));
        wait(100);
        assert_eq!(wait(1), 1, "a long attempt begins again");
    }

    #[test]
    fn a_rank_that_fails_twice_at_once_is_left_out_within_the_range() {
        let mut history = history(100, Some(3));
        assert_eq!(history.failed(&cause(1, 1), 4), restart(1, None));
        assert_eq!(history.failed(&cause(2, 1), 4), restart(2, None), "another rank");
        assert_eq!(history.failed(&cause(2, 1), 4), restart(4, Some(2)));
        assert_eq!(history.failed(&cause(2, 1), 3), restart(8, None));
        assert_eq!(history.failed(&cause(2, 1), 3), restart(16, None), "the minimum");
        let mut fixed = self::history(100, None);
        assert_eq!(fixed.failed(&cause(1, 1), 4), restart(1, None));
        assert_eq!(fixed.failed(&cause(1, 1), 4), restart(2, None));
        let mut late = self::history(100, Some(1));
        late.failed(&cause(1, 100), 4);
        assert_eq!(late.failed(&cause(1, 100), 4), restart(1, None), "it had come back");
    }

    #[test]
    fn the_report_names_the_last_failures() {
        let mut history = history(100, None);
        assert!(history.report(true).is_empty());
        (0..30).for_each(|rank| {
            history.failed(&cause(rank, 1), 40);
        });
        let report = history.report(true);
        assert_eq!(report[0], "the run has ended well after 30 restarts of at most 100");
        assert_eq!(report[1], "  .. 20 earlier failures");
        assert!(report[2].starts_with("  failure 21: rank 20,"), "{report:?}");
        assert_eq!(report.len(), 12);
    }
}
