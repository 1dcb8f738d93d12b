//! Chrome's Trace Event Format, as a schema that a file is checked against.
//!
//! It is that of "Trace Event Format" by the Chrome developers, which Perfetto's import also reads: the
//! JSON object format, with the phases that traces of this crate have.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

/// Type of a member.
#[derive(Clone, Copy, Debug)]
enum Type {
    /// A string that is not empty.
    Text,
    /// A finite number from 0, of microseconds.
    Time,
    /// An integer from 0.
    Integer,
    Object,
}

use Type::{Integer, Object, Text, Time};

/// Members that the events of a phase have.
const REQUIRED: [(&str, &[(&str, Type)]); 7] = [
    ("B", &[("name", Text), ("cat", Text), ("ts", Time), ("pid", Integer), ("tid", Integer)]),
    ("E", &[("ts", Time), ("pid", Integer), ("tid", Integer)]),
    ("C", &[("name", Text), ("ts", Time), ("pid", Integer), ("args", Object)]),
    ("M", &[("name", Text), ("pid", Integer), ("tid", Integer), ("args", Object)]),
    ("s", &FLOW),
    ("t", &FLOW),
    ("f", &FLOW),
];
const FLOW: [(&str, Type); 6] =
    [("name", Text), ("cat", Text), ("id", Text), ("ts", Time), ("pid", Integer), ("tid", Integer)];
/// Members that an event may have besides those.
const OPTIONAL: [(&str, &[&str]); 4] =
    [("B", &["args"]), ("E", &["name", "cat", "args"]), ("C", &["tid", "cat"]), ("f", &["bp"])];
/// Names of metadata, and the member of `args` with their value.
const METADATA: [(&str, &str, Type); 4] = [
    ("process_name", "name", Text),
    ("process_sort_index", "sort_index", Integer),
    ("thread_name", "name", Text),
    ("thread_sort_index", "sort_index", Integer),
];

type Thread = (u64, u64);
type Event = Map<String, Value>;

/// What the events before the present one have left.
#[derive(Debug, Default)]
struct State {
    /// Names of the spans that are open.
    open: BTreeMap<Thread, Vec<String>>,
    last: BTreeMap<Thread, f64>,
    processes: BTreeSet<u64>,
    threads: BTreeSet<Thread>,
    /// Phases and times of each arrow.
    arrows: BTreeMap<(String, String, String), Vec<(String, f64)>>,
    seen: BTreeSet<Thread>,
}

/// Checks a file.
///
/// # Errors
///
/// The first violation, with the index of its event.
pub fn check(file: &Value) -> Result<(), String> {
    let unit = file["displayTimeUnit"].as_str().unwrap_or("");
    if !["ms", "ns"].contains(&unit) {
        return Err(format!("displayTimeUnit: `{unit}`"));
    }
    let events = file["traceEvents"].as_array().ok_or("traceEvents: no array")?;
    let mut state = State::default();
    for (index, event) in events.iter().enumerate() {
        let wrong = |what: String| format!("event {index}: {what}: {event}");
        let event = event.as_object().ok_or_else(|| wrong("no object".into()))?;
        members(event).map_err(wrong)?;
        state.add(event).map_err(wrong)?;
    }
    state.end()
}

fn is(value: &Value, wanted: Type) -> bool {
    match wanted {
        Text => value.as_str().is_some_and(|text| !text.is_empty()),
        Time => value.as_f64().is_some_and(|time| time.is_finite() && time >= 0.0),
        Integer => value.is_u64(),
        Object => value.is_object(),
    }
}

/// Checks that an event has the members of its phase, and no others.
fn members(event: &Event) -> Result<(), String> {
    let phase = event.get("ph").and_then(Value::as_str).ok_or("no phase")?;
    let required = REQUIRED.iter().find(|(known, _)| *known == phase);
    let (_, required) = required.ok_or_else(|| format!("unknown phase {phase}"))?;
    for (name, wanted) in *required {
        let value = event.get(*name).ok_or_else(|| format!("no {name}"))?;
        if !is(value, *wanted) {
            return Err(format!("{name} is no {wanted:?}"));
        }
    }
    let optional = OPTIONAL.iter().find(|(known, _)| *known == phase).map_or(&[][..], |it| it.1);
    let known = |name: &str| name == "ph" || required.iter().any(|(known, _)| *known == name);
    match event.keys().find(|name| !known(name) && !optional.contains(&name.as_str())) {
        Some(name) => Err(format!("{name} is no member of the phase {phase}")),
        None => Ok(()),
    }
}

fn text(event: &Event, name: &str) -> String {
    event[name].as_str().unwrap_or_default().to_string()
}

impl State {
    fn add(&mut self, event: &Event) -> Result<(), String> {
        let phase = text(event, "ph");
        let number = |name: &str| event.get(name).and_then(Value::as_u64).unwrap_or(0);
        let thread = (number("pid"), number("tid"));
        if phase == "M" {
            return self.metadata(event, thread);
        }
        let time = event["ts"].as_f64().unwrap_or(0.0);
        let last = self.last.insert(thread, time).unwrap_or(0.0);
        if time < last {
            return Err(format!("the time is below {last}, that of the event before"));
        }
        if phase != "C" {
            self.seen.insert(thread);
        }
        let open = self.open.entry(thread).or_default();
        match phase.as_str() {
            "B" => open.push(text(event, "name")),
            "E" => _ = open.pop().ok_or("an end without a begin")?,
            "C" => {
                let args = event["args"].as_object().expect("it was checked");
                if args.is_empty() || !args.values().all(|value| is(value, Time)) {
                    return Err("a counter has numbers".into());
                }
            }
            phase => {
                if open.is_empty() {
                    return Err("an arrow lies in a span".into());
                }
                if phase == "f" && event.get("bp").and_then(Value::as_str) != Some("e") {
                    return Err("an arrow ends at the span around it: bp is e".into());
                }
                let key = (text(event, "cat"), text(event, "name"), text(event, "id"));
                self.arrows.entry(key).or_default().push((phase.into(), time));
            }
        }
        Ok(())
    }

    fn metadata(&mut self, event: &Event, thread: Thread) -> Result<(), String> {
        let name = text(event, "name");
        let known = METADATA.iter().find(|(known, ..)| *known == name);
        let (_, member, wanted) = known.ok_or_else(|| format!("unknown metadata {name}"))?;
        if !event["args"].get(*member).is_some_and(|value| is(value, *wanted)) {
            return Err(format!("args.{member} is no {wanted:?}"));
        }
        match name.as_str() {
            "process_name" => _ = self.processes.insert(thread.0),
            "thread_name" => _ = self.threads.insert(thread),
            _ => {}
        }
        Ok(())
    }

    fn end(self) -> Result<(), String> {
        for (thread, open) in &self.open {
            if let Some(name) = open.last() {
                return Err(format!("the span `{name}` of {thread:?} does not end"));
            }
        }
        for thread in &self.seen {
            if !self.processes.contains(&thread.0) {
                return Err(format!("the process {} has no name", thread.0));
            }
            if !self.threads.contains(thread) {
                return Err(format!("the thread {thread:?} has no name"));
            }
        }
        for ((_, name, id), mut parts) in self.arrows {
            // Threads lie side by side in the file, so that the parts are not in the order of time.
            parts.sort_by(|a, b| a.1.total_cmp(&b.1));
            let count = |phase: &str| parts.iter().filter(|(of, _)| of == phase).count();
            if (count("s"), count("f")) != (1, 1) {
                return Err(format!("the arrow {name} {id} has not one begin and one end"));
            }
            let (first, last) = (parts[0].1, parts[parts.len() - 1].1);
            let at = |phase: &str| parts.iter().find(|(of, _)| of == phase).map(|(_, time)| *time);
            if (at("s"), at("f")) != (Some(first), Some(last)) {
                return Err(format!("the arrow {name} {id} is not in the order of time"));
            }
        }
        Ok(())
    }
}
