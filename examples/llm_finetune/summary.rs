//! Result of a run: a table, or the object of `--json`.

use std::fmt;

use serde::Serialize;

use crate::common::report::{grouped, table_row};
use crate::generate::Answer;

/// Result of a run. `Display` formats the table, and serde the object of `--json`.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Number of ranks.
    pub world_size: usize,
    /// Name of the sharding strategy.
    pub strategy: String,
    /// Number of parameters of the unsharded model, with adapters.
    pub num_params: usize,
    /// Bytes of parameters that this rank holds between steps.
    pub sharded_bytes_per_rank: usize,
    /// Peak of the bytes counted in device memory, on this rank.
    pub peak_memory_bytes: usize,
    /// Number of steps taken by this process, without those before it resumed.
    pub steps: usize,
    /// Tokens trained on per second, over all ranks, without padding.
    pub tokens_per_second: f64,
    /// Median duration of a step, in seconds.
    pub step_seconds_median: f64,
    /// Loss of the last step.
    pub train_loss: Option<f64>,
    /// Perplexity on the held-out conversations before the first step.
    pub perplexity_before: Option<f64>,
    /// Perplexity on the held-out conversations at the end.
    pub perplexity: Option<f64>,
    /// Perplexity of a bigram model on the held-out conversations, as a baseline.
    pub bigram_perplexity: Option<f64>,
    /// Training loss of every step: the mean over the counted tokens of all ranks.
    pub losses: Vec<f64>,
    /// Duration of every step, in seconds. On a GPU the first one compiles kernels.
    pub step_seconds: Vec<f64>,
    /// Answers to the messages of `--generate`.
    pub answers: Vec<Answer>,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![
            ("ranks", self.world_size.to_string()),
            ("strategy", self.strategy.clone()),
            ("parameters", grouped(self.num_params)),
            ("sharded bytes per rank", grouped(self.sharded_bytes_per_rank)),
            ("peak memory in bytes", grouped(self.peak_memory_bytes)),
            ("steps", grouped(self.steps)),
            ("tokens per second", grouped(self.tokens_per_second.round() as usize)),
        ];
        let numbers = [
            ("final train loss", self.train_loss),
            ("perplexity before", self.perplexity_before),
            ("perplexity", self.perplexity),
            ("perplexity of a bigram", self.bigram_perplexity),
        ];
        rows.extend(
            numbers
                .into_iter()
                .filter_map(|(name, number)| Some((name, format!("{:.4}", number?)))),
        );
        let rows: Vec<_> = rows.iter().map(|(name, value)| table_row(name, value)).collect();
        f.write_str(&rows.join("\n"))?;
        self.answers.iter().try_for_each(|answer| write!(f, "\n\n{answer}"))
    }
}
