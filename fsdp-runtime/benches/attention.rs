//! Time of `nn::attention`, forward and backward, beside that of attention made of Burn's operations
//! and of PyTorch's `scaled_dot_product_attention`.
//!
//!     cargo bench --bench attention -- [--lengths 512,1024,2048] [--python PYTHON]
//!
//! Heads 12, width 64, batch 1, f32, with and without `causal`. With `--python`, an interpreter that has
//! PyTorch, `torch_attention.py` runs as a process of its own and takes turns with the others, on as
//! many threads. Times are medians over all rounds, in milliseconds.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Distribution, Tensor};
use clap::Parser;
use fsdp_runtime::nn::{AttentionOptions, attention};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const HEADS: usize = 12;
const WIDTH: usize = 64;
const WARM_UP: usize = 2;

#[derive(Parser)]
struct Cli {
    /// Lengths of queries and keys.
    #[arg(long, value_delimiter = ',', default_value = "512,1024,2048")]
    lengths: Vec<usize>,
    /// Rounds, in each of which every variant runs once.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Threads of each variant.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Longest length that is also measured with Burn's operations.
    #[arg(long, default_value_t = 2048)]
    longest_composed: usize,
    /// Python with PyTorch.
    #[arg(long)]
    python: Option<String>,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Seconds of forward and backward.
type Times = [f64; 2];

fn main() {
    let cli = Cli::parse();
    let threads = rayon::ThreadPoolBuilder::new().num_threads(cli.threads);
    threads.build_global().expect("the first pool");
    let mut torch = cli.python.as_ref().map(|python| Torch::start(python, cli.threads));
    for &length in &cli.lengths {
        for causal in [false, true] {
            measure(&cli, torch.as_mut(), length, causal);
        }
    }
}

/// Prints the medians of all variants of one shape.
fn measure(cli: &Cli, mut torch: Option<&mut Torch>, length: usize, causal: bool) {
    let (mut ours, mut burns, mut torchs) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..WARM_UP + cli.rounds {
        let keep = |all: &mut Vec<Times>, times| {
            if round >= WARM_UP {
                all.push(times);
            }
        };
        keep(
            &mut ours,
            run(length, |[query, key, value]| {
                attention(query, key, value, AttentionOptions::new().with_causal(causal))
            }),
        );
        if length <= cli.longest_composed {
            let options = AttentionModuleOptions { is_causal: causal, ..Default::default() };
            keep(
                &mut burns,
                run(length, |[query, key, value]| {
                    burn::tensor::module::attention(query, key, value, None, None, options)
                }),
            );
        }
        if let Some(torch) = &mut torch {
            keep(&mut torchs, torch.run(length, causal));
        }
    }
    println!("length {length}{}", if causal { ", causal" } else { "" });
    let total = median(&ours, |[forward, backward]| forward + backward);
    for (name, times) in
        [("nn::attention", ours), ("Burn's operations", burns), ("PyTorch", torchs)]
    {
        if times.is_empty() {
            continue;
        }
        let [forward, backward] = [0, 1].map(|at| median(&times, |times| times[at]) * 1e3);
        let both = median(&times, |[forward, backward]| forward + backward);
        println!(
            "  {name:20} forward {forward:8.1}  backward {backward:8.1}  both {:8.1} ms  ours / this {:.2}",
            both * 1e3,
            total / both
        );
    }
}

fn median(times: &[Times], of: impl Fn(Times) -> f64) -> f64 {
    let mut times: Vec<f64> = times.iter().copied().map(of).collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Runs one forward and backward.
fn run(length: usize, function: impl Fn([Tensor<4>; 3]) -> Tensor<4>) -> Times {
    let device = Device::flex().autodiff();
    let heads = || {
        let distribution = Distribution::Normal(0.0, 1.0);
        Tensor::<4>::random([1, HEADS, length, WIDTH], distribution, &device)
    };
    let tensors = [(); 3].map(|()| heads().require_grad());
    let weights = heads();
    let start = Instant::now();
    let output = function(tensors.clone());
    let forward = start.elapsed().as_secs_f64();
    let loss = (output * weights).sum();
    let start = Instant::now();
    let gradients = loss.backward();
    let backward = start.elapsed().as_secs_f64();
    for tensor in tensors {
        assert!(tensor.grad(&gradients).is_some());
    }
    [forward, backward]
}

/// PyTorch, as a process that runs one forward and backward for each line that it reads.
struct Torch {
    process: Child,
    requests: ChildStdin,
    times: BufReader<ChildStdout>,
}

impl Torch {
    fn start(python: &str, threads: usize) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/torch_attention.py");
        let mut process = Command::new(python)
            .args([script, &threads.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("Python starts");
        let requests = process.stdin.take().expect("a pipe");
        let times = BufReader::new(process.stdout.take().expect("a pipe"));
        Self { process, requests, times }
    }

    fn run(&mut self, length: usize, causal: bool) -> Times {
        writeln!(self.requests, "{HEADS} {length} {WIDTH} {}", u8::from(causal))
            .expect("PyTorch runs");
        let mut line = String::new();
        self.times.read_line(&mut line).expect("PyTorch answers");
        let mut times = line.split_whitespace().map(|time| time.parse().expect("seconds"));
        [(); 2].map(|()| times.next().expect("two times"))
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        // It ends at the end of its input at the latest.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
