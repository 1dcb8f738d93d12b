//! The file of a trace: its form, and that it has what the ranks have done.
//!
//! One test in a binary of its own: the trace is the subscriber of the whole process.
#![cfg(feature = "trace")]

#[path = "support/mlp.rs"]
mod mlp;

use std::collections::{BTreeMap, HashSet};

use burn::tensor::{Device, Distribution, Tensor};
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Counts, Error, FsdpTrace, Memory, TraceError};
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
fn train(worker: &Worker) -> Result<Expected, Error> {
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

    fn time(&self) -> f64 {
        self.0["ts"].as_f64().expect("an event has a time")
    }
}

/// Checks the form of a trace: what Chrome and Perfetto ask for.
fn check_form(events: &[Event<'_>]) {
    let mut open: BTreeMap<(u64, u64), Vec<f64>> = BTreeMap::new();
    let mut last: BTreeMap<(u64, u64), f64> = BTreeMap::new();
    let mut arrows: HashSet<&str> = HashSet::new();
    for event in events {
        if event.phase() == "M" {
            assert!(event.0["args"].is_object());
            continue;
        }
        let (place, time) = (event.place(), event.time());
        let before = last.insert(place, time).unwrap_or(0.0);
        assert!(time >= before, "times of a thread ascend: {}", event.0);
        let spans = open.entry(place).or_default();
        match event.phase() {
            "B" => {
                assert!(!event.name().is_empty() && !event.category().is_empty());
                spans.push(time);
            }
            "E" => assert!(spans.pop().is_some(), "an end without a begin: {}", event.0),
            "s" | "t" | "f" => {
                assert!(!spans.is_empty(), "an arrow lies in a span: {}", event.0);
                let id = event.0["id"].as_str().expect("an arrow has a number");
                if event.phase() == "s" {
                    assert!(arrows.insert(id), "{id} begins once");
                }
            }
            "C" => assert!(event.0["args"].is_object()),
            phase => panic!("an unknown phase {phase}"),
        }
    }
    assert!(open.values().all(Vec::is_empty), "every span ends");
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
    assert_eq!(of("forward", "forward blocks.1"), 2);
    assert_eq!(of("forward", "forward "), 2 * (SIZES.blocks + 1));
    assert!(of("backward", "backward blocks.2") >= 2, "a backward may be interrupted");
    let gathers = after.all_gathers - before.all_gathers;
    assert!(gathers > 0);
    assert_eq!(of("collective", "all_gather"), gathers);
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

#[test]
fn a_trace_has_the_spans_and_the_memory_of_the_chosen_steps() {
    let trace = FsdpTrace::new().with_steps(2..=3);
    assert_eq!(trace.write("unwritten"), Err(TraceError::NoRanks));
    trace.install().unwrap();
    assert_eq!(trace.install(), Err(TraceError::SubscriberInstalled));
    let options = LaunchOptions::new(WORLD).with_device(Device::flex());
    let expected = launch(options, |worker| train(&worker)).unwrap();

    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("no/such/trace.json");
    assert!(
        matches!(trace.write(&missing), Err(TraceError::Write { path, .. }) if path == missing)
    );
    let path = folder.path().join("trace.json");
    trace.write(&path).unwrap();
    let file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let events = file["traceEvents"].as_array().unwrap();
    let events: Vec<_> = events.iter().map(Event).collect();
    check_form(&events);
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
