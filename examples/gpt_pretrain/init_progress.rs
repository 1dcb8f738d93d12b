//! Progress bar of the model's initialisation, fed by the events that `fully_shard` emits to
//! `tracing`.

use std::fmt;
use std::io::IsTerminal;

use indicatif::ProgressBar;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::common::report::set_template;

/// Progress bar that counts initialised parameters.
pub struct InitBar {
    bar: ProgressBar,
}

impl InitBar {
    /// Subscribes to the events of `fully_shard`, if standard error is a terminal. The bar appears
    /// with the first event.
    pub fn show() {
        if !std::io::stderr().is_terminal() {
            return;
        }
        let bar = ProgressBar::no_length();
        set_template(&bar, "{bar:30} {human_pos}/{human_len} parameters  {wide_msg}");
        let of_init = filter_fn(|event| event.target() == "fsdp::init");
        // It fails if there is another subscriber, which only a test sets.
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

/// Fields of an event with the target `fsdp::init`.
#[derive(Default)]
struct Progress {
    rank: u64,
    /// Number of parameters initialised so far.
    done: u64,
    /// Number of all parameters.
    all: u64,
    /// Path of the tensor that was initialised last.
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::{Arc, Mutex};

    use fsdp_runtime::prelude::*;

    use super::*;
    use crate::arch::Arch;
    use crate::common::device::DeviceName;
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

    /// There is an event for each parameter, and one for a tied parameter.
    #[test]
    fn initialisation_reports_its_progress() {
        let arch = Arch { name: "", fairseq: None, layers: 2, width: 8, heads: 2, vocabulary: 10 };
        let seen = Seen::default();
        let of_init = filter_fn(|event| event.target() == "fsdp::init");
        let subscriber =
            Arc::new(tracing_subscriber::registry().with(seen.clone().with_filter(of_init)));
        let device = DeviceName::Flex.resolve().unwrap();
        launch(LaunchOptions::new(2).with_device(device), move |worker| {
            let _on = tracing::subscriber::set_default(subscriber.clone());
            let model = GptConfig { arch, positions: 4, dropout: 0.0, tanh_gelu: false }
                .init(worker.device());
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
}
