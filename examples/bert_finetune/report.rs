//! What the run tells: progress on standard error, the result on standard output.

use std::fmt;
use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::metrics::Scores;

/// Where no terminal shows a bar, a line is written every so many steps.
const LINE_EVERY: usize = 20;

/// The progress of a run: a bar on a terminal, lines elsewhere, or nothing. Only rank 0 has one.
pub enum Progress {
    /// `--quiet`, and every rank but the first.
    Silent,
    /// Standard error is a terminal.
    Bar(ProgressBar),
    /// Standard error is a file or a pipe.
    Lines {
        /// Steps in the run.
        total: usize,
    },
}

/// What is known after a step.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Steps taken, this one included.
    pub number: usize,
    /// Rank 0's loss; the mean over ranks is known at the end of the epoch.
    pub loss: f64,
    /// The learning rate it took.
    pub learning_rate: f64,
    /// Word pieces a second so far, over all ranks, filling not counted.
    pub tokens_per_second: f64,
}

impl Progress {
    /// Progress over `total` steps, in the form that fits standard error.
    pub fn new(total: usize, quiet: bool) -> Self {
        if quiet {
            return Self::Silent;
        }
        if !std::io::stderr().is_terminal() {
            return Self::Lines { total };
        }
        let bar = ProgressBar::new(total as u64);
        let style = "{bar:30} {pos}/{len}  {msg}  {elapsed_precise} (left {eta})";
        match ProgressStyle::with_template(style) {
            Ok(style) => bar.set_style(style),
            Err(error) => debug_assert!(false, "the bar's template: {error}"),
        }
        Self::Bar(bar)
    }

    /// Tells of a step.
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

    /// Tells of an epoch: its mean training loss over all ranks, and how the held-out split went.
    pub fn epoch(&self, number: usize, train_loss: f64, scores: Scores, took: Duration) {
        let Scores { accuracy, f1 } = scores;
        self.note(&format!(
            "epoch {number}  train loss {train_loss:.4}  accuracy {accuracy:.4}  F1 {f1:.4}  \
             {:.1} s",
            took.as_secs_f64()
        ));
    }

    /// Tells of anything else, on a line of its own.
    pub fn note(&self, line: &str) {
        match self {
            Self::Silent => {}
            Self::Bar(bar) => bar.suspend(|| eprintln!("{line}")),
            Self::Lines { .. } => eprintln!("{line}"),
        }
    }

    /// Ends the bar.
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

/// The result of a run. Displayed, it is the table; serialized, the object of `--json`.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Number of ranks.
    pub world_size: usize,
    /// The sharding strategy's name.
    pub strategy: String,
    /// Parameters of the whole model.
    pub num_params: usize,
    /// Most bytes of parameters that a rank holds between steps.
    pub sharded_bytes_per_rank: usize,
    /// Most bytes that a rank held for gathered parameters at one time.
    pub peak_unsharded_bytes: usize,
    /// Steps taken.
    pub steps: usize,
    /// Word pieces trained on a second, over all ranks, filling not counted.
    pub tokens_per_second: f64,
    /// Mean training loss of the last epoch.
    pub train_loss: f64,
    /// Of the held-out split, at the end.
    pub accuracy: f64,
    /// Of the held-out split, at the end.
    pub f1: f64,
    /// Median time of a step, in seconds.
    pub step_seconds_median: f64,
    /// Training loss of every step, mean over ranks.
    pub losses: Vec<f64>,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = [
            ("ranks", self.world_size.to_string()),
            ("strategy", self.strategy.clone()),
            ("parameters", grouped(self.num_params)),
            ("sharded bytes per rank", grouped(self.sharded_bytes_per_rank)),
            ("peak unsharded bytes per rank", grouped(self.peak_unsharded_bytes)),
            ("steps", grouped(self.steps)),
            ("tokens per second", grouped(self.tokens_per_second.round() as usize)),
            ("final train loss", format!("{:.4}", self.train_loss)),
            ("accuracy", format!("{:.4}", self.accuracy)),
            ("F1", format!("{:.4}", self.f1)),
        ];
        let mut lines = rows.iter().map(|(name, value)| format!("{name:<30}{value:>14}"));
        f.write_str(&lines.by_ref().collect::<Vec<_>>().join("\n"))
    }
}

/// `1234567` as `1,234,567`.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.char_indices() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary() -> Summary {
        Summary {
            world_size: 2,
            strategy: "FULL_SHARD".into(),
            num_params: 1_234_567,
            sharded_bytes_per_rank: 2_469_134,
            peak_unsharded_bytes: 999,
            steps: 1000,
            tokens_per_second: 20_000.4,
            train_loss: 0.25,
            accuracy: 0.98,
            f1: 0.97,
            step_seconds_median: 0.5,
            losses: vec![0.7, 0.6],
        }
    }

    #[test]
    fn the_json_object_has_the_promised_names_in_order() {
        let json = serde_json::to_string(&summary()).unwrap();
        let names = [
            "world_size",
            "strategy",
            "num_params",
            "sharded_bytes_per_rank",
            "peak_unsharded_bytes",
            "steps",
            "tokens_per_second",
            "train_loss",
            "accuracy",
            "f1",
            "step_seconds_median",
            "losses",
        ];
        let places = names.map(|name| json.find(&format!("\"{name}\":")).unwrap());
        assert!(places.is_sorted(), "{json}");
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value.as_object().unwrap().len(), names.len());
        assert!(!json.contains('\n'));
    }

    #[test]
    fn the_table_has_a_line_each_and_aligned_columns() {
        let table = summary().to_string();
        assert_eq!(table.lines().count(), 10);
        assert!(table.lines().all(|line| line.len() == 44), "{table}");
        assert!(table.contains("1,234,567") && table.contains("20,000"), "{table}");
    }

    #[test]
    fn digits_are_grouped_by_three() {
        assert_eq!([0, 999, 1000, 1_000_000].map(grouped), ["0", "999", "1,000", "1,000,000"]);
    }
}
