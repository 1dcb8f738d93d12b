//! Time and peak resident memory of a training step of GPT-2 (124 M), one rank, in f32: all parameters,
//! LoRA adapters of rank 8 on all linear layers, and adapters on a base in NF4.
//!
//! ```text
//! cargo bench --bench lora -- --python venv/bin/python
//! ```
//!
//! Each way runs in a process of its own, and the ways take turns in each round. Times are medians over
//! all counted steps; memory is the largest. With `--python`, an interpreter that has torch, transformers
//! and PEFT, `torch_lora.py` takes part.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use burn::tensor::Device;
use clap::Parser;
use fsdp_runtime::Error;
use fsdp_runtime::lora::LoraConfig;
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::options::{StoragePolicy, StorageType};
use fsdp_runtime::prelude::*;

#[path = "common/gpt2.rs"]
mod gpt2;
#[path = "common/resident.rs"]
mod resident;

use gpt2::Gpt2;
use resident::resident;

const WAYS: [&str; 3] = ["full", "lora", "lora-nf4"];
const TORCH_WAYS: [&str; 2] = ["full", "lora"];
/// Steps of a process that are not counted.
const WARM_UP: usize = 2;

#[derive(Clone, Debug, Parser)]
struct Cli {
    /// Number of rounds, each of which runs every way once.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Steps of a process, the first two of which are not counted.
    #[arg(long, default_value_t = 6)]
    steps: usize,
    /// Tokens of a step, in one row.
    #[arg(long, default_value_t = 256)]
    length: usize,
    /// Rank of the adapters.
    #[arg(long, default_value_t = 8)]
    rank: usize,
    /// Interpreter with torch, transformers and PEFT, for the comparison.
    #[arg(long)]
    python: Option<PathBuf>,
    /// Runs one way in this process.
    #[arg(long, hide = true)]
    way: Option<String>,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Seconds of each counted step, and the peak resident memory in MB.
#[derive(Clone, Debug, Default)]
struct Measured {
    seconds: Vec<f64>,
    peak: f64,
}

impl Measured {
    fn median(&self) -> f64 {
        let mut seconds = self.seconds.clone();
        seconds.sort_by(f64::total_cmp);
        seconds.get(seconds.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let cli = Cli::parse();
    if let Some(way) = cli.way.clone() {
        return train(cli, way);
    }
    let mut results = BTreeMap::<String, Measured>::new();
    for _ in 0..cli.rounds {
        for way in WAYS {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["--way", way]);
            measure(&mut results, format!("here {way}"), command, &cli)?;
        }
        for way in TORCH_WAYS.iter().filter(|_| cli.python.is_some()) {
            let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/torch_lora.py");
            let mut command = Command::new(cli.python.as_deref().unwrap_or(Path::new("python3")));
            command.arg(script).args(["--way", way]);
            measure(&mut results, format!("torch {way}"), command, &cli)?;
        }
    }
    print(&results);
    Ok(())
}

/// Runs one way, which prints the seconds of its steps and its peak, and adds what it measured.
fn measure(
    results: &mut BTreeMap<String, Measured>,
    name: String,
    mut command: Command,
    cli: &Cli,
) -> Result<(), Failure> {
    let numbers = [("--steps", cli.steps), ("--length", cli.length), ("--rank", cli.rank)];
    command.args(numbers.iter().flat_map(|(key, value)| [key.to_string(), value.to_string()]));
    let output = command.stderr(std::process::Stdio::inherit()).output()?;
    let text = String::from_utf8(output.stdout)?;
    let line = text.lines().rev().find(|line| line.starts_with("measured "));
    let line = line.ok_or_else(|| format!("{name} printed no result"))?;
    let numbers = line.split_whitespace().skip(1).map(str::parse);
    let mut numbers = numbers.collect::<Result<Vec<f64>, _>>()?;
    let peak = numbers.pop().ok_or("a peak is the last number")?;
    println!("{name:14} {:.3} s, {peak:.0} MB", numbers.iter().sum::<f64>() / numbers.len() as f64);
    let result = results.entry(name).or_default();
    result.seconds.extend(numbers);
    result.peak = result.peak.max(peak);
    Ok(())
}

/// Prints the medians, and the ratios that matter.
fn print(results: &BTreeMap<String, Measured>) {
    println!("\n| way | seconds a step | peak resident memory |\n|---|---|---|");
    for (name, measured) in results {
        println!("| {name} | {:.3} | {:.0} MB |", measured.median(), measured.peak);
    }
    for (name, base) in [
        ("here lora", "here full"),
        ("here lora-nf4", "here full"),
        ("torch lora", "torch full"),
        ("here lora", "torch lora"),
        ("here full", "torch full"),
    ] {
        if let (Some(measured), Some(base_measured)) = (results.get(name), results.get(base)) {
            let time = measured.median() / base_measured.median();
            let memory = measured.peak / base_measured.peak;
            println!("{name} / {base}: {time:.3} of the time, {memory:.3} of the memory");
        }
    }
}

/// Trains in one way, and prints what was measured.
fn train(cli: Cli, way: String) -> Result<(), Failure> {
    let options = LaunchOptions::new(1).with_device(Device::flex());
    let measured = launch(options, move |worker| steps(&worker, &cli, &way))?.remove(0);
    let seconds = measured.seconds.iter().map(f64::to_string).collect::<Vec<_>>().join(" ");
    println!("measured {seconds} {}", measured.peak);
    Ok(())
}

fn steps(worker: &Worker, cli: &Cli, way: &str) -> Result<Measured, Error> {
    let device = worker.device();
    let mut model = Gpt2::new(device);
    let mut options = FsdpOptions::new().with_seed(1);
    if way != "full" {
        model = LoraConfig::new(cli.rank).apply(model)?;
    }
    if way == "lora-nf4" {
        options = options.with_storage(StoragePolicy::new().with_frozen(StorageType::NF4));
    }
    let mut model = fully_shard(model, worker, options)?;
    let mut optimizer = AdamWConfig::new().init();
    let (ids, targets) = gpt2::batch(cli.length, device);
    let mut measured = Measured::default();
    for step in 0..cli.steps {
        let start = Instant::now();
        let loss = model.forward(ids.clone(), targets.clone());
        let value = loss.clone().into_scalar::<f32>();
        let gradients = model.backward(loss)?;
        model = optimizer.step(1e-4, model, gradients);
        if step >= WARM_UP {
            measured.seconds.push(start.elapsed().as_secs_f64());
        }
        eprintln!("{way} step {step}: loss {value:.4}");
    }
    measured.peak = resident().map_or(f64::NAN, |(_, peak)| peak);
    Ok(measured)
}
