//! Result of a run: a table, or the object of `--json`.

use std::fmt;

use fsdp_runtime::memory::{Memory, MemoryForecast};
use serde::{Serialize, Serializer};

use crate::common::report::{grouped, table_row};
use crate::generate::Generated;

/// Result of a run. `Display` formats the table, and serde the object of `--json`.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Name of the model's size.
    pub arch: &'static str,
    /// Number of ranks.
    pub world_size: usize,
    /// Name of the sharding strategy.
    pub strategy: String,
    /// Number of parameters of the unsharded model.
    pub num_params: usize,
    /// Number of updates, including those before the run was resumed.
    pub updates: usize,
    /// Number of overflows in half precision, each of which took the batches of an update.
    pub skipped_updates: usize,
    /// Word pieces trained on since the run started or resumed, over all ranks.
    pub words: usize,
    /// Word pieces trained on per second, over all ranks.
    pub words_per_second: f64,
    /// Median duration of an update, in seconds.
    pub update_seconds_median: f64,
    /// Mean training loss in base 2 of the updates of the last log line.
    pub train_loss: f64,
    /// Perplexity per word piece of the held-out text; not under `--generate-only`.
    pub held_out_perplexity: Option<f64>,
    /// Perplexity of a Kneser-Ney bigram model on the same word pieces; not for preprocessed data.
    pub bigram_perplexity: Option<f64>,
    /// Forecast of the peak memory of a rank, in bytes by kind.
    #[serde(serialize_with = "forecast_kinds")]
    pub forecast: MemoryForecast,
    /// Peak device memory of this rank, in bytes by kind. Activations are not counted.
    #[serde(serialize_with = "memory_kinds")]
    pub memory: Memory,
    /// Peak host memory of this rank's offloaded tensors, in bytes by kind.
    #[serde(serialize_with = "memory_kinds")]
    pub host_memory: Memory,
    /// Texts of `--generate`, in their order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub generated: Vec<Generated>,
    /// Training loss of every update since the run started or resumed, in base 2, mean over ranks.
    pub losses: Vec<f64>,
}

fn forecast_kinds<S: Serializer>(forecast: &MemoryForecast, to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(forecast.kinds())
}

fn memory_kinds<S: Serializer>(memory: &Memory, to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(memory.kinds().map(|(name, usage)| (name, usage.peak)))
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let perplexity =
            |known: Option<f64>| known.map_or("-".into(), |known| format!("{known:.2}"));
        let mib = |bytes: usize| format!("{:.2}", bytes as f64 / f64::from(1 << 20));
        let rows = [
            ("model", self.arch.to_string()),
            ("ranks", self.world_size.to_string()),
            ("strategy", self.strategy.clone()),
            ("parameters", grouped(self.num_params)),
            ("updates", grouped(self.updates)),
            ("skipped updates", grouped(self.skipped_updates)),
            ("word pieces", grouped(self.words)),
            ("word pieces per second", grouped(self.words_per_second.round() as usize)),
            ("final train loss, base 2", format!("{:.4}", self.train_loss)),
            ("held-out perplexity", perplexity(self.held_out_perplexity)),
            ("a bigram model's", perplexity(self.bigram_perplexity)),
        ];
        for (name, value) in rows {
            writeln!(f, "{}", table_row(name, &value))?;
        }
        write!(f, "{:<16}{:>14}{:>14}", "MiB a rank", "forecast", "at most")?;
        let held: Vec<_> = self.memory.kinds().collect();
        for (name, forecast) in self.forecast.kinds() {
            let held = held.iter().find(|(kind, _)| *kind == name && name != "total");
            let held = held.map_or("-".into(), |(_, usage)| mib(usage.peak));
            write!(f, "\n{name:<16}{:>14}{held:>14}", mib(forecast))?;
        }
        for text in &self.generated {
            write!(f, "\n\n{text}")?;
        }
        Ok(())
    }
}
