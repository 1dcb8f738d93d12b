//! The file of a trace: its form, and that it has what the ranks have done.
//!
//! A binary of its own: the trace is the subscriber of the whole process.
#![cfg(feature = "trace")]

#[path = "support/mlp.rs"]
mod mlp;
#[path = "support/trace_schema.rs"]
mod schema;

use std::collections::HashSet;
use std::path::Path;

use burn::tensor::{Device, Distribution, Tensor};
use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::Checkpoint;
use fsdp_runtime::memory::Memory;
use fsdp_runtime::model::Counts;
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::trace::{FsdpTrace, TraceError};
use mlp::Sizes;
use serde_json::Value;

const SIZES: Sizes = Sizes { blocks: 3, width: 16, hidden: 32, outputs: 2 };
const WORLD: usize = 2;
const STEPS: usize = 4;

/// What a rank says of the recorded steps.
struct Expected {
    /// Operations before the first recorded step, and after the last.
    counts: [Counts; 2],
    memory: Memory,
}

/// Trains, and returns what the trace should have of the steps 2 and 3.
fn train(worker: &Worker, folder: &Path) -> Result<Expected, Error> {
    let options = FsdpOptions::new()
        .with_seed(1)
        .with_activation_checkpointing(ActivationCheckpointing::None);
    let mut net = fully_shard(SIZES.init(worker.device()), worker, options)?;
    let mut optimizer = AdamWConfig::new().init();
    let mut counts = Vec::new();
    let mut memory = net.stats().memory();
    for step in 0..STEPS {
        counts.push(net.stats().counts());
        let input = Tensor::random([4, SIZES.width], Distribution::Default, worker.device());
        let loss = net.forward(input).sum();
        let gradients = net.backward(loss)?;
        net = optimizer.step(1e-3, net, gradients);
        if step == 1 {
            // Without a manager.
            Checkpoint::new(1).with_model("net", &net).save(worker, folder)?;
        }
        if step == 2 {
            memory = net.stats().memory();
        }
    }
    Ok(Expected { counts: [counts[1], counts[3]], memory })
}

/// An event of the file.
struct Event<'a>(&'a Value);

impl<'a> Event<'a> {
    fn phase(&self) -> &'a str {
        self.0["ph"].as_str().expect("every event has a phase")
    }

    fn name(&self) -> &'a str {
        self.0["name"].as_str().unwrap_or("")
    }

    fn category(&self) -> &'a str {
        self.0["cat"].as_str().unwrap_or("")
    }

    /// Rank and thread.
    fn place(&self) -> (u64, u64) {
        let number = |key: &str| self.0[key].as_u64().expect("every event has a place");
        (number("pid"), number("tid"))
    }
}

/// Returns how many spans of a rank have a name that begins with `prefix`.
fn spans(events: &[Event<'_>], rank: u64, category: &str, prefix: &str) -> usize {
    let is_one = |event: &&Event<'_>| {
        event.phase() == "B"
            && event.place().0 == rank
            && event.category() == category
            && event.name().starts_with(prefix)
    };
    events.iter().filter(is_one).count()
}

/// Checks that the trace has what a rank has done in the recorded steps.
fn check_rank(events: &[Event<'_>], rank: u64, expected: &Expected) {
    let [before, after] = expected.counts;
    let of = |category: &str, prefix: &str| spans(events, rank, category, prefix);
    assert_eq!(of("optimizer", "optimizer step"), 2);
    assert_eq!(of("pass", "backward pass"), 2);
    assert_eq!(of("checkpoint", "save"), 1);
    assert_eq!(of("forward", "forward blocks.1"), 2);
    assert_eq!(of("forward", "forward "), 2 * (SIZES.blocks + 1));
    assert!(of("backward", "backward blocks.2") >= 2, "a backward may be interrupted");
    let gathers = after.all_gathers - before.all_gathers;
    assert!(gathers > 0);
    // The save has all-gathers of its own.
    let of_units = of("collective", "all_gather blocks.") + of("collective", "all_gather (root)");
    assert_eq!(of_units, gathers);
    assert_eq!(of("collective", "all_gather the contents of a checkpoint"), 1);
    assert_eq!(of("collective", "reduce_scatter"), after.reduce_scatters - before.reduce_scatters);
    assert!(of("wait", "") > 0);
    let of_rank = |event: &&Event<'_>| event.place().0 == rank;
    let arrow = |phase: &str| {
        let is_one = |event: &&Event<'_>| event.phase() == phase;
        let ids = events.iter().filter(of_rank).filter(is_one);
        ids.map(|event| event.0["id"].to_string()).collect::<HashSet<_>>()
    };
    assert!(arrow("f").intersection(&arrow("s")).count() >= gathers, "issue to wait");
    assert!(arrow("t").intersection(&arrow("s")).count() >= gathers, "issue to work");
    let mut counters = events.iter().filter(of_rank).filter(|event| event.phase() == "C");
    let last = counters.next_back().expect("memory is recorded").0;
    assert_eq!(last["name"], "device memory");
    let gradients = last["args"]["gradients"].as_u64().expect("gradients are counted");
    assert_eq!(gradients, expected.memory.gradients.now as u64);
}

/// Changes one thing in a valid file at a time, and checks that the schema names it.
fn planted_errors_fail(file: &Value) {
    let events = file["traceEvents"].as_array().unwrap();
    let find = |phase: &str| events.iter().position(|event| event["ph"] == phase).unwrap();
    let last = |phase: &str| events.iter().rposition(|event| event["ph"] == phase).unwrap();
    let thread = |index: usize| (events[index]["pid"].clone(), events[index]["tid"].clone());
    let named = |name: &str| events.iter().position(|event| event["name"] == name).unwrap();
    let end = last("E");
    type Change = Box<dyn Fn(&mut Vec<Value>)>;
    let set = |index: usize, name: &'static str, value: Value| -> Change {
        Box::new(move |events| events[index][name] = value.clone())
    };
    let remove = |index: usize| -> Change { Box::new(move |events| _ = events.remove(index)) };
    let (begin, counter, issue, finish) = (find("B"), find("C"), find("s"), find("f"));
    let metadata = named("process_name");
    let of_begin = thread(begin);
    let planted: Vec<(Change, &str)> = vec![
        (set(begin, "ph", "Q".into()), "unknown phase Q"),
        (set(begin, "name", "".into()), "name is no Text"),
        (set(begin, "cat", Value::Null), "cat is no Text"),
        (set(begin, "ts", (-1.0).into()), "ts is no Time"),
        (set(begin, "pid", "0".into()), "pid is no Integer"),
        (set(begin, "color", "red".into()), "color is no member"),
        (set(end, "ts", 0.0.into()), "the time is below"),
        (remove(named("optimizer step")), "an end without a begin"),
        (remove(end), "does not end"),
        (set(counter, "args", serde_json::json!({ "shards": "many" })), "a counter has numbers"),
        (set(finish, "bp", Value::Null), "bp is e"),
        (remove(issue), "has not one begin and one end"),
        (remove(finish), "has not one begin and one end"),
        (set(metadata, "name", "process".into()), "unknown metadata"),
        (set(metadata, "args", serde_json::json!({})), "args.name is no Text"),
        (
            Box::new(|events| events.retain(|event| event["name"] != "process_name")),
            "the process 0 has no name",
        ),
        (remove(named("thread_name")), "the thread (0, 0) has no name"),
        (
            Box::new(move |events| {
                let (pid, tid) = of_begin.clone();
                let arrow = serde_json::json!({
                    "ph": "s", "name": "a", "cat": "b", "id": "c", "ts": 0, "pid": pid, "tid": tid,
                });
                events.insert(begin, arrow);
            }),
            "an arrow lies in a span",
        ),
    ];
    for (change, expected) in planted {
        let mut changed = file.clone();
        change(changed["traceEvents"].as_array_mut().unwrap());
        let error = schema::check(&changed).expect_err(expected);
        assert!(error.contains(expected), "{expected}: {error}");
    }
    let other = serde_json::json!({ "displayTimeUnit": "s", "traceEvents": [] });
    assert!(schema::check(&other).unwrap_err().contains("displayTimeUnit"));
}

/// Checks the files that the variable `FSDP_TRACE_FILES` names, separated by spaces, such as those of
/// processes that another program has started.
#[test]
fn given_files_fit_the_schema() {
    let Ok(files) = std::env::var("FSDP_TRACE_FILES") else { return };
    for path in files.split_whitespace() {
        let file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        schema::check(&file).unwrap_or_else(|error| panic!("{path}: {error}"));
        eprintln!("{path}: {} events", file["traceEvents"].as_array().unwrap().len());
    }
}

#[test]
fn a_trace_has_the_spans_and_the_memory_of_the_chosen_steps() {
    let trace = FsdpTrace::new().with_steps(2..=3);
    assert_eq!(trace.write("unwritten"), Err(TraceError::NoRanks));
    trace.install().unwrap();
    assert_eq!(trace.install(), Err(TraceError::SubscriberInstalled));
    let options = LaunchOptions::new(WORLD).with_device(Device::flex());
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = folder.path().join("checkpoint");
    let expected = launch(options, move |worker| train(&worker, &checkpoint)).unwrap();

    let missing = folder.path().join("no/such/trace.json");
    assert!(
        matches!(trace.write(&missing), Err(TraceError::Write { path, .. }) if path == missing)
    );
    let path = folder.path().join("trace.json");
    trace.write(&path).unwrap();
    let file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    schema::check(&file).unwrap();
    planted_errors_fail(&file);
    let events = file["traceEvents"].as_array().unwrap();
    let events: Vec<_> = events.iter().map(Event).collect();
    assert_eq!((trace.dropped(), &file["otherData"]["dropped_records"]), (0, &Value::from(0)));
    let names: Vec<_> = events
        .iter()
        .filter(|event| event.name() == "process_name")
        .map(|event| event.0["args"]["name"].as_str().unwrap())
        .collect();
    assert!(names.contains(&"rank 0") && names.contains(&"rank 1"));
    for (rank, expected) in expected.iter().enumerate() {
        check_rank(&events, rank as u64, expected);
    }
}
