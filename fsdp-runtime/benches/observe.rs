//! Cost of a trace, and of a record of memory over time: the time of a step with and without them.
//!
//! `cargo bench --bench observe -- --world 2`
//!
//! Every variant runs in a process of its own, because a trace is the subscriber of its process and
//! cannot be taken away. All variants take turns in each round, in an order that rotates, so that other
//! load on the machine affects all of them. A round's figure is the median step of the slowest rank, and
//! the printed one is the median over the rounds. The files are written after the steps, which the
//! column `write` has.

use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use burn::tensor::Device;
use clap::{Parser, ValueEnum};
use fsdp_runtime::Error;
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::trace::FsdpTrace;

#[path = "common/allocator.rs"]
mod allocator;
#[allow(dead_code, reason = "this bench has no variant in bf16")]
#[path = "common/bert.rs"]
mod bert;

use bert::{Batch, Bert, Sizes};

/// Steps of a process that are not counted.
const WARM_UP: usize = 2;

/// Cost of a trace, and of a record of memory over time.
#[derive(Clone, Debug, Parser)]
struct Cli {
    /// Number of ranks.
    #[arg(long, default_value_t = 2)]
    world: usize,
    /// Steps of each process, of which the first two are not counted.
    #[arg(long, default_value_t = 12)]
    steps: usize,
    /// Number of rounds, each of which runs every variant once.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    #[command(flatten)]
    sizes: Sizes,
    /// Prints one JSON object for each variant: seconds of a step and of the files, and the ratio of the
    /// steps.
    #[arg(long)]
    json: bool,
    /// Runs one variant and prints the seconds of its step and of its files.
    #[arg(long, hide = true)]
    only: Option<Variant>,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// What is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Variant {
    Nothing,
    Trace,
    Timeline,
    Both,
}

impl Variant {
    const ALL: [Self; 4] = [Self::Nothing, Self::Trace, Self::Timeline, Self::Both];

    fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Trace => "trace",
            Self::Timeline => "timeline",
            Self::Both => "both",
        }
    }

    fn traces(self) -> bool {
        matches!(self, Self::Trace | Self::Both)
    }

    fn records_memory(self) -> bool {
        matches!(self, Self::Timeline | Self::Both)
    }
}

/// Seconds of a step, and those of writing the files.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    step: f64,
    write: f64,
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Trains on one rank. Returns the seconds of each step, and those of writing the file.
fn train(cli: &Cli, records_memory: bool, worker: &Worker) -> Result<(Vec<f64>, f64), Error> {
    let device = worker.device();
    let data = Batch::new(&cli.sizes, worker.rank().index(), device);
    let options = FsdpOptions::new().with_seed(0);
    let mut model = fully_shard(Bert::new(&cli.sizes, device), worker, options)?;
    let name = format!("fsdp-observe-{}-{}.json", std::process::id(), worker.rank());
    let path = std::env::temp_dir().join(name);
    let file = records_memory.then(|| model.stats().memory_file(&path).expect("a known form"));
    let mut optimizer = AdamWConfig::new().init();
    let mut seconds = Vec::new();
    for _ in 0..cli.steps.max(WARM_UP + 1) {
        let begin = Instant::now();
        let loss = data.loss(&model);
        let value = loss.clone();
        let gradients = model.backward(loss)?;
        model = optimizer.step(1e-5, model, gradients);
        let value = value.into_scalar::<f32>();
        seconds.push(begin.elapsed().as_secs_f64());
        assert!(value.is_finite());
    }
    let begin = Instant::now();
    if let Some(file) = file {
        file.finish(&Ok::<_, Error>(())).expect("a temporary file");
        let _ = std::fs::remove_file(path);
    }
    Ok((seconds.split_off(WARM_UP), begin.elapsed().as_secs_f64()))
}

/// Runs a variant in this process.
fn run(cli: &Cli, variant: Variant) -> Times {
    let trace = variant.traces().then(FsdpTrace::new);
    if let Some(trace) = &trace {
        trace.install().expect("the first subscriber");
    }
    let options = LaunchOptions::new(cli.world).with_device(Device::flex());
    let job = cli.clone();
    let ranks = launch(options, move |worker| train(&job, variant.records_memory(), &worker));
    let ranks = ranks.unwrap_or_else(|error| panic!("{}: {error}", variant.name()));
    let slowest = |step: usize| ranks.iter().map(|rank| rank.0[step]).fold(0.0, f64::max);
    let step = median((0..ranks[0].0.len()).map(slowest).collect());
    let mut write = ranks.iter().map(|rank| rank.1).fold(0.0, f64::max);
    if let Some(trace) = trace {
        let path = std::env::temp_dir().join(format!("fsdp-observe-{}.json", std::process::id()));
        let begin = Instant::now();
        trace.write(&path).expect("a temporary file");
        write += begin.elapsed().as_secs_f64();
        assert_eq!(
            trace.dropped(),
            0,
            "a trace without all of its records is cheaper; use fewer --steps"
        );
        let _ = std::fs::remove_file(path);
    }
    Times { step, write }
}

/// Runs a variant in a process of its own.
fn run_process(variant: Variant) -> Result<Times, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).args(["--only", variant.name()]);
    let output = command.stderr(Stdio::inherit()).output().map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let numbers: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match (output.status.success(), numbers.as_slice()) {
        (true, [step, write]) => Ok(Times { step: *step, write: *write }),
        _ => Err(format!("the process of {} ended with {}: {text}", variant.name(), output.status)),
    }
}

fn print(cli: &Cli, variant: Variant, times: &[Times], nothing: f64) {
    let name = variant.name();
    let step = median(times.iter().map(|times| times.step).collect());
    let write = median(times.iter().map(|times| times.write).collect());
    let ratio = step / nothing;
    if cli.json {
        let rounds: Vec<f64> = times.iter().map(|times| times.step).collect();
        let result = serde_json::json!({
            "variant": name, "world": cli.world, "step": step, "write": write, "ratio": ratio,
            "rounds": rounds,
        });
        println!("{result}");
    } else {
        println!("{name:<12}{step:>10.4}{:>10.2}{write:>10.4}", 100.0 * (ratio - 1.0));
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    allocator::choose(false);
    if let Some(variant) = cli.only {
        let Times { step, write } = run(&cli, variant);
        println!("{step} {write}");
        return ExitCode::SUCCESS;
    }
    let mut times = [const { Vec::new() }; Variant::ALL.len()];
    for round in 0..cli.rounds.max(1) {
        for turn in 0..Variant::ALL.len() {
            let index = (round + turn) % Variant::ALL.len();
            match run_process(Variant::ALL[index]) {
                Ok(of_round) => times[index].push(of_round),
                Err(error) => {
                    eprintln!("{error}");
                    return ExitCode::FAILURE;
                }
            }
        }
    }
    if !cli.json {
        println!("{:<12}{:>10}{:>10}{:>10}", "records", "step s", "cost %", "write s");
    }
    let nothing = median(times[0].iter().map(|times| times.step).collect());
    for (variant, times) in Variant::ALL.into_iter().zip(&times) {
        print(&cli, variant, times, nothing);
    }
    ExitCode::SUCCESS
}
