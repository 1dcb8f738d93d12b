//! What the run tells beside its log lines: a bar while the model is initialised, and the result.

use std::fmt;
use std::io::IsTerminal;

use fsdp_runtime::{Memory, MemoryForecast};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Serialize, Serializer};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// A bar of the parameters that are initialised and cut, from what `fully_shard` tells `tracing`.
pub struct InitBar {
    bar: ProgressBar,
}

impl InitBar {
    /// Shows the bar on a terminal, once `fully_shard` runs.
    pub fn show() {
        if !std::io::stderr().is_terminal() {
            return;
        }
        let bar = ProgressBar::no_length();
        let style = "{bar:30} {human_pos}/{human_len} parameters  {wide_msg}";
        match ProgressStyle::with_template(style) {
            Ok(style) => bar.set_style(style),
            Err(error) => debug_assert!(false, "the bar's template: {error}"),
        }
        let of_init = filter_fn(|event| event.target() == "fsdp::init");
        // Another subscriber is only there where a test has set one.
        let _ = tracing_subscriber::registry().with(Self { bar }.with_filter(of_init)).try_init();
    }
}

impl<S: Subscriber> Layer<S> for InitBar {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut found = Progress::default();
        event.record(&mut found);
        let Progress { rank, done, all, path } = found;
        if rank != 0 {
            return;
        }
        self.bar.set_length(all);
        self.bar.set_position(done);
        self.bar.set_message(path);
        if done == all {
            self.bar.finish_and_clear();
        }
    }
}

/// The fields of an event of `fsdp::init`.
#[derive(Default)]
struct Progress {
    rank: u64,
    done: u64,
    all: u64,
    path: String,
}

impl Visit for Progress {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "rank" => self.rank = value,
            "done" => self.done = value,
            "all" => self.all = value,
            _ => {}
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "path" {
            self.path = value.to_string();
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}
}

/// The result of a run. Displayed, it is the table; serialized, the object of `--json`.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// The model's size by name.
    pub arch: &'static str,
    /// Number of ranks.
    pub world_size: usize,
    /// The sharding strategy's name.
    pub strategy: String,
    /// Parameters of the whole model.
    pub num_params: usize,
    /// Updates made.
    pub updates: usize,
    /// Batches that an overflow in half precision left without an update.
    pub skipped_updates: usize,
    /// Word pieces trained on.
    pub words: usize,
    /// Word pieces trained on a second, over all ranks.
    pub words_per_second: f64,
    /// Median seconds of an update.
    pub update_seconds_median: f64,
    /// Mean training loss since the last log line but one, in base 2.
    pub train_loss: f64,
    /// Perplexity a word piece of the held-out text.
    pub held_out_perplexity: f64,
    /// A Kneser-Ney bigram model's, of the same word pieces.
    pub bigram_perplexity: f64,
    /// Bytes a rank was to hold at most, by kind.
    #[serde(serialize_with = "forecast_kinds")]
    pub forecast: MemoryForecast,
    /// Bytes it held at most, by kind; activations are not counted.
    #[serde(serialize_with = "memory_kinds")]
    pub memory: Memory,
    /// Bytes it held at most in the host's memory in the device's place, by kind.
    #[serde(serialize_with = "memory_kinds")]
    pub host_memory: Memory,
    /// Training loss of every update in base 2, mean over ranks.
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
            ("held-out perplexity", format!("{:.2}", self.held_out_perplexity)),
            ("a bigram model's", format!("{:.2}", self.bigram_perplexity)),
        ];
        for (name, value) in rows {
            writeln!(f, "{name:<30}{value:>14}")?;
        }
        write!(f, "{:<16}{:>14}{:>14}", "MiB a rank", "forecast", "at most")?;
        for (name, forecast) in self.forecast.kinds() {
            let held = self.memory.kinds().find(|(kind, _)| *kind == name && name != "total");
            let held = held.map_or("-".into(), |(_, usage)| mib(usage.peak));
            write!(f, "\n{name:<16}{:>14}{held:>14}", mib(forecast))?;
        }
        Ok(())
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
    use std::collections::BTreeSet;
    use std::sync::{Arc, Mutex};

    use fsdp_runtime::prelude::*;

    use super::*;
    use crate::arch::Arch;
    use crate::device::DeviceName;
    use crate::model::GptConfig;

    type Line = (u64, u64, u64, String);

    #[derive(Clone, Default)]
    struct Seen(Arc<Mutex<Vec<Line>>>);

    impl<S: Subscriber> Layer<S> for Seen {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            let mut found = Progress::default();
            event.record(&mut found);
            self.0.lock().unwrap().push((found.rank, found.done, found.all, found.path));
        }
    }

    /// Parameter by parameter, up to all of them; what is tied comes once.
    #[test]
    fn construction_tells_how_far_it_is() {
        let arch = Arch { name: "", fairseq: None, layers: 2, width: 8, heads: 2, vocabulary: 10 };
        let seen = Seen::default();
        let of_init = filter_fn(|event| event.target() == "fsdp::init");
        let subscriber =
            Arc::new(tracing_subscriber::registry().with(seen.clone().with_filter(of_init)));
        let device = DeviceName::Flex.resolve().unwrap();
        launch(LaunchOptions::new(2).with_device(device), move |worker| {
            let _on = tracing::subscriber::set_default(subscriber.clone());
            let model = GptConfig { arch, positions: 4, dropout: 0.0 }.init(worker.device());
            fully_shard(model, &worker, FsdpOptions::new()).map(|_| ())
        })
        .unwrap();
        let seen = seen.0.lock().unwrap();
        let of_first: Vec<_> = seen.iter().filter(|(rank, ..)| *rank == 0).collect();
        assert_eq!(of_first.len(), 1 + 1 + 2 * 16 + 2);
        assert!(of_first.is_sorted_by_key(|(_, done, ..)| *done));
        let (_, done, all, _) = of_first.last().unwrap();
        assert_eq!(done, all);
        let paths: BTreeSet<_> = of_first.iter().map(|(.., path)| path.as_str()).collect();
        assert_eq!(paths.len(), of_first.len(), "each once: {of_first:?}");
        assert!(paths.contains("norm.beta") && paths.contains("blocks.1.down.weight"));
        assert!(!seen.iter().any(|(.., path)| path == "output"));
    }

    #[test]
    fn digits_are_grouped_by_three() {
        assert_eq!([0, 999, 1000, 1_000_000].map(grouped), ["0", "999", "1,000", "1,000,000"]);
    }
}
