//! Progress of a run, printed to standard error and appended to the log file.

use std::fmt;
use std::io::IsTerminal;
use std::time::Duration;

use indicatif::ProgressBar;

use super::log_file::LogFile;
use super::report::set_template;
use super::tensorboard::TensorBoard;

/// Number of steps between two lines of progress, where there is no bar.
const LINE_EVERY: usize = 20;

/// Display of progress, and the file that gets a copy of its lines.
pub struct Progress {
    display: Display,
    /// Number of steps in the run.
    total: usize,
    file: LogFile,
    board: TensorBoard,
}

/// Display of progress.
enum Display {
    /// Not at all: under `--quiet`, and on all ranks but rank 0.
    Silent,
    /// A bar: standard error is a terminal.
    Bar(ProgressBar),
    /// Lines: standard error is a file or a pipe.
    Lines,
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
    /// Peak of the bytes counted in device memory, where they are shown.
    pub memory: Option<usize>,
    /// Time that the other steps will take, where it is shown.
    pub left: Option<Duration>,
}

impl Progress {
    /// Returns the progress of a run of `total` steps. Its lines are appended to `file`, and its numbers
    /// to `board`, too.
    pub fn new(total: usize, quiet: bool, file: LogFile, board: TensorBoard) -> Self {
        let display = if quiet {
            Display::Silent
        } else if std::io::stderr().is_terminal() {
            let bar = ProgressBar::new(total as u64);
            set_template(&bar, "{bar:30} {pos}/{len}  {msg}  {elapsed_precise} (left {eta})");
            Display::Bar(bar)
        } else {
            Display::Lines
        };
        Self { display, total, file, board }
    }

    /// Returns progress that is neither shown nor written.
    pub fn silent() -> Self {
        let (file, board) = Default::default();
        Self { display: Display::Silent, total: 0, file, board }
    }

    /// Shows a step.
    pub fn step(&self, step: Step) {
        if let Display::Bar(bar) = &self.display {
            bar.set_message(step.to_string());
            bar.set_position(step.number as u64);
        }
        let numbers = [
            ("train/loss", step.loss),
            ("train/lr", step.learning_rate),
            ("train/tokens_per_second", step.tokens_per_second),
        ];
        self.board.numbers(step.number, numbers.map(|(name, number)| (name.to_string(), number)));
        if step.number.is_multiple_of(LINE_EVERY) {
            let line = format!("step {}/{}  {step}", step.number, self.total);
            if let Display::Lines = self.display {
                eprintln!("{line}");
            }
            self.file.line(&line);
        }
    }

    /// Prints a line after `step` steps, such as that of an evaluation, and writes its numbers to the event
    /// file.
    pub fn result<const N: usize>(&self, step: usize, line: &str, numbers: [(&str, f64); N]) {
        self.board.numbers(step, numbers.map(|(name, number)| (name.to_string(), number)));
        self.note(line);
    }

    /// Prints a line.
    pub fn note(&self, line: &str) {
        match &self.display {
            Display::Silent => {}
            Display::Bar(bar) => bar.suspend(|| eprintln!("{line}")),
            Display::Lines => eprintln!("{line}"),
        }
        self.file.line(line);
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Display::Bar(bar) = &self.display {
            bar.finish_and_clear();
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { loss, learning_rate, tokens_per_second, .. } = self;
        write!(f, "loss {loss:.4}  lr {learning_rate:.2e}  {tokens_per_second:.0} tokens/s")?;
        if let Some(bytes) = self.memory {
            write!(f, "  {:.2} GB", bytes as f64 / 1e9)?;
        }
        if let Some(left) = self.left {
            write!(f, "  left {}", indicatif::FormattedDuration(left))?;
        }
        Ok(())
    }
}
