//! The layer of `tracing` that turns spans and events of this crate into records.

use std::fmt::Debug;
use std::sync::Arc;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::LookupSpan;

use super::recorder::{Arrow, Key, Lane, Recorder, Role};

/// Turns the spans and events of this crate into the records of a trace.
#[derive(Debug)]
pub(super) struct TraceLayer {
    recorder: Arc<Recorder>,
}

impl TraceLayer {
    pub(super) fn new(recorder: Arc<Recorder>) -> Self {
        Self { recorder }
    }
}

/// The fields of a span or an event that a trace uses.
#[derive(Debug, Default)]
struct Fields {
    message: String,
    unit: String,
    op: String,
    kind: String,
    thread: String,
    rank: u64,
    id: u64,
    bytes: Option<u64>,
    on_host: bool,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let text = || format!("{value:?}");
        match field.name() {
            "message" => self.message = text(),
            // Names of units are in backticks, for messages.
            "unit" => self.unit = text().replace('`', ""),
            "op" => self.op = text(),
            "kind" => self.kind = text(),
            "thread" => self.thread = text(),
            _ => {}
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "rank" => self.rank = value,
            "id" => self.id = value,
            "bytes" => self.bytes = Some(value),
            _ => {}
        }
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        if field.name() == "on_host" {
            self.on_host = value;
        }
    }
}

/// What a span of `tracing` is in a trace.
#[derive(Clone, Debug)]
enum SpanKind {
    /// The life of a rank's thread.
    Thread(Lane),
    /// The whole backward pass.
    BackwardPass,
    /// A step of the optimizer.
    Step,
    /// Work of the communication thread, to which an arrow leads.
    Work(u64),
    /// A wait of the rank's thread, at which an arrow ends.
    Wait(u64),
    /// Anything else.
    Other { category: &'static str, name: Arc<str>, bytes: Option<u64> },
}

impl SpanKind {
    fn new(metadata: &Metadata<'_>, fields: Fields) -> Self {
        let Fields { unit, op, thread, rank, id, bytes, .. } = fields;
        let other = |category, name: String| {
            let name = format!("{name} {unit}");
            Self::Other { category, name: name.trim_end().into(), bytes }
        };
        match metadata.name() {
            "fsdp::rank" => {
                let role = if thread == "compute" { Role::Compute } else { Role::Communication };
                Self::Thread(Lane { rank: rank as usize, role })
            }
            "fsdp::backward" => Self::BackwardPass,
            "fsdp::step" => Self::Step,
            "fsdp::work" => Self::Work(id),
            "fsdp::wait" => Self::Wait(id),
            "fsdp::collective" => other("collective", op),
            "fsdp::save" => other("checkpoint", op),
            name => other("schedule", name.trim_start_matches("fsdp::").to_string()),
        }
    }
}

/// Returns the name of a kind of memory as a constant.
fn memory_kind(kind: &str) -> Option<&'static str> {
    let kinds =
        ["shards", "replicated", "gathered", "gradients", "activations", "optimizer", "averages"];
    kinds.into_iter().find(|known| *known == kind)
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for TraceLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        span.extensions_mut().insert(SpanKind::new(attributes.metadata(), fields));
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let Some(kind) = span.extensions().get::<SpanKind>().cloned() else { return };
        let key = Key::Span(id.into_u64());
        if let SpanKind::Thread(lane) = kind {
            self.recorder.enter_thread(lane);
            return;
        }
        self.recorder.on_thread(|log| match kind {
            SpanKind::Thread(_) => {}
            SpanKind::BackwardPass => log.begin(key, "pass", "backward pass".into(), None),
            SpanKind::Step => log.begin(key, "optimizer", "optimizer step".into(), None),
            SpanKind::Work(number) => {
                log.begin(key, "work", "work".into(), None);
                log.arrow(Arrow::Step(number));
            }
            SpanKind::Wait(_) => log.begin(key, "wait", "wait".into(), None),
            SpanKind::Other { category, name, bytes } => log.begin(key, category, name, bytes),
        });
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let Some(kind) = span.extensions().get::<SpanKind>().cloned() else { return };
        if let SpanKind::Thread(_) = kind {
            self.recorder.leave_thread();
            return;
        }
        self.recorder.on_thread(|log| {
            if let SpanKind::Wait(number) = kind {
                log.arrow(Arrow::End(number));
            }
            log.end(&Key::Span(id.into_u64()));
            match kind {
                SpanKind::BackwardPass => log.end_backward_pass(),
                SpanKind::Step => log.end_step(),
                _ => {}
            }
        });
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if event.metadata().target() != "fsdp::trace" {
            return;
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        let unit: Arc<str> = fields.unit.into();
        self.recorder.on_thread(|log| match fields.message.as_str() {
            "fsdp::issue" => log.arrow(Arrow::Start(fields.id)),
            "fsdp::begin_forward" => {
                let name = format!("forward {unit}").into();
                log.begin(Key::Forward(unit), "forward", name, None);
            }
            "fsdp::end_forward" => log.end(&Key::Forward(unit)),
            "fsdp::begin_backward" => log.begin_backward(unit),
            "fsdp::end_backward" => log.end_backward(&unit),
            "fsdp::memory" => {
                if let Some(kind) = memory_kind(&fields.kind) {
                    log.memory(kind, fields.on_host, fields.bytes.unwrap_or(0));
                }
            }
            _ => {}
        });
    }
}
