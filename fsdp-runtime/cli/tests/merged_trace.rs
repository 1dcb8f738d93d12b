//! `fsdp trace merge` on the traces of a run.
//!
//! A binary of its own: the trace is the subscriber of the whole process.
#![cfg(all(feature = "trace", feature = "flex"))]

#[path = "cli/mlp.rs"]
mod mlp;
#[path = "cli/trace_schema.rs"]
mod schema;

use std::path::Path;
use std::process::Command;

use burn::tensor::{Device, Distribution, Tensor};
use fsdp_runtime::Error;
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::trace::FsdpTrace;
use mlp::Sizes;
use serde_json::Value;

const SIZES: Sizes = Sizes { blocks: 3, width: 16, hidden: 32, outputs: 2 };
const WORLD: usize = 2;
const STEPS: usize = 4;

fn train(worker: &Worker) -> Result<(), Error> {
    let mut net =
        fully_shard(SIZES.init(worker.device()), worker, FsdpOptions::new().with_seed(1))?;
    let mut optimizer = AdamWConfig::new().init();
    for _ in 0..STEPS {
        let input = Tensor::random([4, SIZES.width], Distribution::Default, worker.device());
        let gradients = net.backward(net.forward(input).sum())?;
        net = optimizer.step(1e-3, net, gradients);
    }
    Ok(())
}

/// Writes a file for each rank, as processes do, with clocks that differ, and joins them.
fn merged_files_fit_the_schema(file: &Value, folder: &Path) {
    let epoch: u128 = file["otherData"]["epoch_ns"].as_str().unwrap().parse().unwrap();
    let files = (0..WORLD).map(|rank| {
        let mut of_rank = file.clone();
        of_rank["otherData"]["epoch_ns"] = (epoch + 3_000_500 * rank as u128).to_string().into();
        let events = of_rank["traceEvents"].as_array_mut().unwrap();
        events.retain(|event| event["pid"] == rank);
        schema::check(&of_rank).unwrap();
        let path = folder.join(format!("trace-rank{rank}.json"));
        std::fs::write(&path, of_rank.to_string()).unwrap();
        path
    });
    let (files, merged): (Vec<_>, _) = (files.collect(), folder.join("merged.json"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_fsdp"));
    let run = command.args(["trace", "merge"]).args(files).arg("-o").arg(&merged).output().unwrap();
    assert!(run.status.success(), "{run:?}");
    let merged: Value = serde_json::from_slice(&std::fs::read(merged).unwrap()).unwrap();
    schema::check(&merged).unwrap();
    let of = |file: &Value, rank: usize| -> Vec<f64> {
        let events = file["traceEvents"].as_array().unwrap().iter();
        let of_rank = events.filter(|event| event["pid"] == rank && event["ph"] != "M");
        of_rank.map(|event| event["ts"].as_f64().unwrap()).collect()
    };
    for rank in 0..WORLD {
        let (before, after) = (of(file, rank), of(&merged, rank));
        assert!(!before.is_empty() && before.len() == after.len());
        let shift = 3000.5 * rank as f64;
        assert!(before.iter().zip(&after).all(|(a, b)| (a + shift - b).abs() < 1e-3));
    }
}

#[test]
fn merged_traces_have_every_event_at_its_time() {
    let trace = FsdpTrace::new().with_steps(2..=3);
    trace.install().unwrap();
    let options = LaunchOptions::new(WORLD).with_device(Device::flex());
    launch(options, |worker| train(&worker)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    trace.write(&path).unwrap();
    let file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    merged_files_fit_the_schema(&file, folder.path());
}
