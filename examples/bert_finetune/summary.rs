//! Result of a run: a table, or the object of `--json`.

use std::fmt;

use serde::Serialize;

use crate::common::report::{grouped, table_row};

/// Result of a run. `Display` formats the table, and serde the object of `--json`.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Number of ranks.
    pub world_size: usize,
    /// Name of the sharding strategy.
    pub strategy: String,
    /// Number of parameters of the unsharded model.
    pub num_params: usize,
    /// Bytes of parameters that a rank holds between steps; maximum over ranks.
    pub sharded_bytes_per_rank: usize,
    /// Peak of the bytes that a rank held in gather buffers; maximum over ranks.
    pub peak_unsharded_bytes: usize,
    /// Mean of the bytes that a rank sent in the all-gathers of a step; maximum over ranks.
    pub sent_bytes_per_step: usize,
    /// Number of steps taken by this process, without those before it resumed.
    pub steps: usize,
    /// Word pieces trained on per second, over all ranks, without padding.
    pub tokens_per_second: f64,
    /// Mean training loss of the last epoch.
    pub train_loss: f64,
    /// Accuracy on the held-out split, at the end.
    pub accuracy: f64,
    /// F1 score on the held-out split, at the end.
    pub f1: f64,
    /// Median duration of a step, in seconds.
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
            ("gathers: bytes sent per step", grouped(self.sent_bytes_per_step)),
            ("steps", grouped(self.steps)),
            ("tokens per second", grouped(self.tokens_per_second.round() as usize)),
            ("final train loss", format!("{:.4}", self.train_loss)),
            ("accuracy", format!("{:.4}", self.accuracy)),
            ("F1", format!("{:.4}", self.f1)),
        ];
        f.write_str(&rows.map(|(name, value)| table_row(name, &value)).join("\n"))
    }
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
            sent_bytes_per_step: 88,
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
            "sent_bytes_per_step",
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
        assert_eq!(table.lines().count(), 11);
        assert!(table.lines().all(|line| line.len() == 44), "{table}");
        assert!(table.contains("1,234,567") && table.contains("20,000"), "{table}");
    }
}
