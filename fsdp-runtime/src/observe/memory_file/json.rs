//! Memory over time as JSON.

use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::param_group::memory::MemoryForecast;
use crate::param_group::memory::{
    Memory, MemoryEvent, MemoryHolder, MemoryMark, MemoryPeak, MemorySample, MemoryTimeline,
};

impl MemoryTimeline {
    /// Returns the record as one JSON object. Memory is in bytes, times are in nanoseconds.
    ///
    /// `device` and `host` have the bytes by kind `before` the first sample, those at the end (`now`)
    /// and at most since the model was sharded (`peak`), the `forecast` by kind or `null`, and
    /// `record_peak`: the moment of the highest total, with its holders. `samples` are the changes.
    /// `marks` are the begins of units and the ends of steps, each with the bytes by kind at that
    /// moment, and the number of samples that precede it. A unit is a module path, which is empty for
    /// the outermost unit; `null` stands for several units.
    pub fn to_json(&self, title: &str, forecast: Option<&MemoryForecast>) -> String {
        let on_device = forecast.map(|forecast| object(forecast.kinds()));
        let on_host = forecast.map(|forecast| object(forecast.host.kinds()));
        let place = |before: Memory, after: Memory, peak: &MemoryPeak, forecast| {
            json!({
                "before": now(before),
                "now": now(after),
                "peak": object(after.kinds().map(|(kind, usage)| (kind, usage.peak))),
                "record_peak": record_peak(peak),
                "forecast": forecast,
            })
        };
        let value = json!({
            "version": 1,
            "title": title,
            "failure": self.failure,
            "duration_ns": nanoseconds(self.duration),
            "dropped_samples": self.dropped,
            "dropped_marks": self.dropped_marks,
            "device": place(self.device_before, self.device_after, &self.device_peak(), on_device),
            "host": place(self.host_before, self.host_after, &self.host_peak(), on_host),
            "holders": self.holders.iter().map(holder).collect::<Vec<_>>(),
            "samples": self.samples.iter().map(sample).collect::<Vec<_>>(),
            "marks": self.marks_as_json(),
        });
        format!("{value}\n")
    }

    fn marks_as_json(&self) -> Vec<Value> {
        let levels = self.device_at_marks().into_iter().zip(self.host_at_marks());
        let mark = |(mark, (device, host)): (&MemoryMark, (Memory, Memory))| {
            let (event, key, value) = match &mark.event {
                MemoryEvent::Forward { unit } => ("forward", "unit", json!(unit)),
                MemoryEvent::Backward { unit } => ("backward", "unit", json!(unit)),
                MemoryEvent::Step { number } => ("step", "number", json!(number)),
            };
            json!({
                "time_ns": nanoseconds(mark.time), "event": event, key: value,
                "samples": mark.samples, "device": now(device), "host": now(host),
            })
        };
        self.marks.iter().zip(levels).map(mark).collect()
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn object(kinds: impl Iterator<Item = (&'static str, usize)>) -> Value {
    let members: Map<String, Value> =
        kinds.map(|(kind, bytes)| (kind.to_string(), json!(bytes))).collect();
    Value::Object(members)
}

/// Returns the present bytes by kind.
fn now(memory: Memory) -> Value {
    object(memory.kinds().map(|(kind, usage)| (kind, usage.now)))
}

fn record_peak(peak: &MemoryPeak) -> Value {
    json!({
        "time_ns": nanoseconds(peak.time),
        "bytes": peak.bytes,
        "holders": peak.holders.iter().map(holder).collect::<Vec<_>>(),
    })
}

fn holder(holder: &MemoryHolder) -> Value {
    let MemoryHolder { kind, on_host, unit, bytes } = holder;
    json!({ "kind": kind, "on_host": on_host, "unit": unit, "bytes": bytes })
}

fn sample(sample: &MemorySample) -> Value {
    let MemorySample { time, kind, on_host, bytes, unit } = sample;
    let time = nanoseconds(*time);
    json!({ "time_ns": time, "kind": kind, "on_host": on_host, "unit": unit, "bytes": bytes })
}
