//! Progress of a run, printed to standard error.

use std::fmt;
use std::io::IsTerminal;
use std::time::Duration;

use indicatif::ProgressBar;

use crate::common::report::set_template;
use crate::metrics::Scores;

/// Number of steps between two lines of progress, where there is no bar.
const LINE_EVERY: usize = 20;

/// Display of progress.
pub enum Progress {
    /// Not at all: under `--quiet`, and on all ranks but rank 0.
    Silent,
    /// A bar: standard error is a terminal.
    Bar(ProgressBar),
    /// Lines: standard error is a file or a pipe.
    Lines {
        /// Number of steps in the run.
        total: usize,
    },
}

/// State of the run after a step.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Number of steps taken, including this one.
    pub number: usize,
    /// Loss on rank 0. The mean over ranks is known at the end of the epoch only.
    pub loss: f64,
    /// Learning rate of the step.
    pub learning_rate: f64,
    /// Mean number of word pieces per second since the start, over all ranks, without padding.
    pub tokens_per_second: f64,
}

impl Progress {
    /// Returns the progress of a run of `total` steps.
    pub fn new(total: usize, quiet: bool) -> Self {
        if quiet {
            return Self::Silent;
        }
        if !std::io::stderr().is_terminal() {
            return Self::Lines { total };
        }
        let bar = ProgressBar::new(total as u64);
        set_template(&bar, "{bar:30} {pos}/{len}  {msg}  {elapsed_precise} (left {eta})");
        Self::Bar(bar)
    }

    /// Shows a step.
    pub fn step(&self, step: Step) {
        match self {
            Self::Silent => {}
            Self::Bar(bar) => {
                bar.set_message(step.to_string());
                bar.set_position(step.number as u64);
            }
            Self::Lines { total } => {
                if step.number.is_multiple_of(LINE_EVERY) {
                    eprintln!("step {}/{total}  {step}", step.number);
                }
            }
        }
    }

    /// Shows the end of an epoch: its mean training loss over all ranks, and the scores on the
    /// held-out split.
    pub fn epoch(&self, number: usize, train_loss: f64, scores: Scores, took: Duration) {
        let Scores { accuracy, f1 } = scores;
        self.note(&format!(
            "epoch {number}  train loss {train_loss:.4}  accuracy {accuracy:.4}  F1 {f1:.4}  \
             {:.1} s",
            took.as_secs_f64()
        ));
    }

    /// Prints a line.
    pub fn note(&self, line: &str) {
        match self {
            Self::Silent => {}
            Self::Bar(bar) => bar.suspend(|| eprintln!("{line}")),
            Self::Lines { .. } => eprintln!("{line}"),
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { loss, learning_rate, tokens_per_second, .. } = self;
        write!(f, "loss {loss:.4}  lr {learning_rate:.2e}  {tokens_per_second:.0} tokens/s")
    }
}
