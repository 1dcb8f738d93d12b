//! Result of a run: a table, or the object of `--json`.

use std::fmt;

use fsdp_runtime::memory::{Memory, MemoryForecast, MemoryTimeline};
use serde::Serialize;

use crate::common::report::{grouped, table_row};

/// Result of a run. `Display` formats the table, and serde the object of `--json`.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Number of ranks.
    pub world_size: usize,
    /// Name of the sharding strategy.
    pub strategy: String,
    /// Number of units: groups of parameters that are gathered together.
    pub units: usize,
    /// Number of parameters of the unsharded model.
    pub num_params: usize,
    /// Number of passes over the training digits.
    pub epochs: usize,
    /// Duration of the training loop, tests included, in seconds.
    pub seconds: f64,
    /// Mean training loss of the last epoch.
    pub train_loss: f64,
    /// Mean loss on the test digits, at the end.
    pub test_loss: f64,
    /// Accuracy on the test digits, at the end.
    pub accuracy: f64,
    /// Peak memory of a rank, by kind.
    pub memory: Peaks,
    /// Memory that was computed before the run.
    #[serde(skip)]
    #[cfg_attr(not(feature = "plot"), allow(dead_code, reason = "only pictures need it"))]
    pub forecast: MemoryForecast,
    /// The sharded model, printed.
    #[serde(skip)]
    pub wrapped: String,
    /// Memory over time in the first steps, if it was recorded.
    #[serde(skip)]
    #[cfg_attr(not(feature = "plot"), allow(dead_code, reason = "only pictures need it"))]
    pub timeline: Option<MemoryTimeline>,
}

/// Peak memory of a rank, in bytes. Each kind has a peak of its own, which may be at another moment
/// than that of the total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Peaks {
    /// Parameters that the rank keeps: shards and replicated parameters.
    pub parameters: usize,
    /// Gather buffers.
    pub gathered: usize,
    /// Gradients.
    pub gradients: usize,
    /// State of the optimizer.
    pub optimizer: usize,
    /// All kinds together, on the device.
    pub total: usize,
    /// All kinds together, in host memory.
    pub host: usize,
}

impl Peaks {
    /// Returns the peaks of the device's memory and of the host's.
    pub fn new(device: Memory, host: Memory) -> Self {
        Self {
            parameters: device.shards.peak + device.replicated.peak,
            gathered: device.gathered.peak,
            gradients: device.gradients.peak,
            optimizer: device.optimizer.peak,
            total: device.total.peak,
            host: host.total.peak,
        }
    }

    /// Returns every kind with its name, in the order of the fields.
    pub fn kinds(&self) -> [(&'static str, usize); 6] {
        [
            ("parameters", self.parameters),
            ("gathered", self.gathered),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("total", self.total),
            ("host", self.host),
        ]
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n", self.wrapped)?;
        let mut rows = vec![
            ("ranks".to_string(), self.world_size.to_string()),
            ("strategy".to_string(), self.strategy.clone()),
            ("units".to_string(), self.units.to_string()),
            ("parameters".to_string(), grouped(self.num_params)),
            ("epochs".to_string(), self.epochs.to_string()),
            ("seconds in the training loop".to_string(), format!("{:.2}", self.seconds)),
            ("train loss".to_string(), format!("{:.4}", self.train_loss)),
            ("test loss".to_string(), format!("{:.4}", self.test_loss)),
            ("accuracy".to_string(), format!("{:.4}", self.accuracy)),
        ];
        let kinds = self.memory.kinds();
        rows.extend(kinds.map(|(name, bytes)| (format!("peak bytes, {name}"), grouped(bytes))));
        let rows: Vec<String> = rows.iter().map(|(name, value)| table_row(name, value)).collect();
        f.write_str(&rows.join("\n"))
    }
}
