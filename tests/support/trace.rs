//! Spans and events of the target `fsdp`, recorded as lines.

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

#[derive(Default)]
struct Fields {
    name: String,
    unit: String,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => self.name = format!("{value:?}"),
            "unit" => self.unit = format!("{value:?}"),
            _ => {}
        }
    }
}

impl Log {
    fn push(&self, fields: &Fields) {
        let name = fields.name.trim_start_matches("fsdp::");
        let line = format!("{name} {}", fields.unit.replace('`', "")).trim().to_string();
        self.0.lock().unwrap().push(line);
    }
}

impl<S: Subscriber> Layer<S> for Log {
    fn on_new_span(&self, attributes: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        let mut fields = Fields { name: attributes.metadata().name().into(), ..Fields::default() };
        attributes.record(&mut fields);
        if attributes.metadata().target() == "fsdp" {
            self.push(&fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        if event.metadata().target() == "fsdp" {
            self.push(&fields);
        }
    }
}

/// Runs `f`. Returns its value and a line for each span and event on this thread, such as `unshard
/// blocks.0`.
pub fn record<T>(f: impl FnOnce() -> T) -> (T, Vec<String>) {
    let log = Log::default();
    let subscriber = tracing_subscriber::registry().with(log.clone());
    let value = tracing::subscriber::with_default(subscriber, f);
    let lines = std::mem::take(&mut *log.0.lock().unwrap());
    (value, lines)
}

/// Returns the lines whose first word is one of `names`.
pub fn only(lines: &[String], names: &[&str]) -> Vec<String> {
    let wanted = |line: &&String| names.iter().any(|name| line.split(' ').next() == Some(name));
    lines.iter().filter(wanted).cloned().collect()
}
