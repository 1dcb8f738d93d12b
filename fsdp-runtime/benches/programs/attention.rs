//! Time of `nn::attention`, forward and backward, beside that of attention made of Burn's operations
//! and of PyTorch's `scaled_dot_product_attention`.
//!
//!     cargo bench --bench attention -- [--lengths 512,1024,2048] [--python PYTHON]
//!     cargo bench --bench attention --features cuda -- --device cuda --dtype bf16 --batch 4 --json
//!
//! Heads 12, width 64, batch 1, f32: without a mask, with `causal`, and with `causal` over rows that hold eight
//! documents of equal length. `nn::attention` alone has packed rows. With `--python`, an interpreter that has
//! PyTorch, `torch_attention.py` runs as a process of its own and takes turns with the others, on as
//! many threads. Times are medians over all rounds, in milliseconds, and ratios those of the medians. `--json`
//! prints only the times of `nn::attention` without packed rows, in seconds, as one object for each shape.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Distribution, FloatDType, Int, Tensor};
use clap::{Parser, ValueEnum};
use fsdp_runtime::nn::{AttentionOptions, attention};

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
    /// Documents of a packed row, which divide the lengths.
    #[arg(long, default_value_t = 8)]
    documents: usize,
    /// Longest length that is also measured with Burn's operations.
    #[arg(long, default_value_t = 2048)]
    longest_composed: usize,
    /// Device; its Cargo feature must be on.
    #[arg(long, value_enum, default_value = "flex")]
    device: Which,
    /// Dtype of the tensors.
    #[arg(long, value_enum, default_value = "f32")]
    dtype: Dtype,
    /// Rows of a batch.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Print JSON.
    #[arg(long, conflicts_with = "python")]
    json: bool,
    /// Python with PyTorch, for f32 on Flex with one row.
    #[arg(long, conflicts_with_all = ["batch", "dtype", "device"])]
    python: Option<String>,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Which {
    Flex,
    Cpu,
    Cuda,
}

#[derive(Clone, Copy, ValueEnum)]
enum Dtype {
    F32,
    Bf16,
}

impl Which {
    fn device(self) -> Option<Device> {
        match self {
            Self::Flex => Some(Device::flex()),
            #[cfg(feature = "cpu")]
            Self::Cpu => Some(Device::cpu()),
            #[cfg(feature = "cuda")]
            Self::Cuda => Some(Device::cuda(0)),
            #[allow(unreachable_patterns)]
            _ => None,
        }
    }
}

/// What is measured.
struct Shape {
    device: Device,
    dtype: FloatDType,
    batch: usize,
    length: usize,
}

/// Seconds of forward and backward.
type Times = [f64; 2];

pub fn main() {
    let cli = Cli::parse();
    let threads = rayon::ThreadPoolBuilder::new().num_threads(cli.threads);
    threads.build_global().expect("the first pool");
    let Some(device) = cli.device.device() else {
        eprintln!("the device is not compiled in: add `--features cpu` or `cuda`");
        std::process::exit(2);
    };
    let dtype = match cli.dtype {
        Dtype::F32 => FloatDType::F32,
        Dtype::Bf16 => FloatDType::BF16,
    };
    let mut torch = cli.python.as_ref().map(|python| Torch::start(python, cli.threads));
    for &length in &cli.lengths {
        let shape = Shape { device: device.clone().autodiff(), dtype, batch: cli.batch, length };
        if cli.json {
            for mask in [Mask::None, Mask::Causal] {
                measure_alone(&cli, &shape, mask);
            }
        } else {
            measure(&cli, torch.as_mut(), &shape);
        }
    }
}

/// Which keys a query sees.
#[derive(Clone, Copy, PartialEq)]
enum Mask {
    None,
    Causal,
    /// Causal, in rows of as many documents.
    Packed(usize),
}

impl Mask {
    fn options(self, shape: &Shape) -> AttentionOptions {
        let options = AttentionOptions::new().with_causal(self != Self::None);
        let Self::Packed(documents) = self else { return options };
        let positions = Tensor::<1, Int>::arange(0..shape.length as i64, &shape.device);
        let numbers = positions.div_scalar((shape.length / documents) as i64);
        options.with_segments(numbers.unsqueeze().repeat_dim(0, shape.batch))
    }

    fn name(self) -> String {
        match self {
            Self::None => String::new(),
            Self::Causal => ", causal".into(),
            Self::Packed(documents) => format!(", causal, {documents} documents"),
        }
    }
}

/// Prints the medians of `nn::attention` as JSON.
fn measure_alone(cli: &Cli, shape: &Shape, mask: Mask) {
    let mut times = Vec::new();
    for round in 0..WARM_UP + cli.rounds {
        let one = run(shape, ours(shape, mask));
        if round >= WARM_UP {
            times.push(one);
        }
    }
    let [forward, backward] = [0, 1].map(|at| median(&times, |times| times[at]));
    let both = median(&times, |[forward, backward]| forward + backward);
    let causal = mask == Mask::Causal;
    println!(
        r#"{{"length": {}, "causal": {causal}, "forward": {forward:e}, "backward": {backward:e}, "both": {both:e}}}"#,
        shape.length
    );
}

fn ours(shape: &Shape, mask: Mask) -> impl Fn([Tensor<4>; 3]) -> Tensor<4> {
    let options = mask.options(shape);
    move |[query, key, value]| attention(query, key, value, options.clone())
}

fn burns(mask: Mask) -> impl Fn([Tensor<4>; 3]) -> Tensor<4> {
    let is_causal = mask == Mask::Causal;
    let options = AttentionModuleOptions { is_causal, ..Default::default() };
    move |[query, key, value]| {
        burn::tensor::module::attention(query, key, value, None, None, options)
    }
}

/// Prints the medians of all variants of one shape. All masks take turns.
fn measure(cli: &Cli, mut torch: Option<&mut Torch>, shape: &Shape) {
    let length = shape.length;
    let masks = [Mask::None, Mask::Causal, Mask::Packed(cli.documents)];
    let mut times: [[Vec<Times>; 3]; 3] = Default::default();
    for round in 0..WARM_UP + cli.rounds {
        let keep = |all: &mut Vec<Times>, times| {
            if round >= WARM_UP {
                all.push(times);
            }
        };
        for (mask, [own, of_burn, of_torch]) in masks.into_iter().zip(&mut times) {
            keep(own, run(shape, ours(shape, mask)));
            if matches!(mask, Mask::Packed(_)) {
                continue;
            }
            if length <= cli.longest_composed {
                keep(of_burn, run(shape, burns(mask)));
            }
            if let Some(torch) = &mut torch {
                keep(of_torch, torch.run(length, mask == Mask::Causal));
            }
        }
    }
    let total = |times: &[Times]| median(times, |[forward, backward]| forward + backward);
    let unmasked = total(&times[0][0]);
    for (mask, times) in masks.into_iter().zip(&times) {
        let own = total(&times[0]);
        let share = own / unmasked;
        println!("length {length}{}: {share:.2} of the time without a mask", mask.name());
        for (name, times) in ["nn::attention", "Burn's operations", "PyTorch"].iter().zip(times) {
            if times.is_empty() {
                continue;
            }
            let [forward, backward] = [0, 1].map(|at| median(times, |times| times[at]) * 1e3);
            let both = total(times);
            println!(
                "  {name:20} forward {forward:8.1}  backward {backward:8.1}  both {:8.1} ms  ours / this {:.2}",
                both * 1e3,
                own / both
            );
        }
    }
}

fn median(times: &[Times], of: impl Fn(Times) -> f64) -> f64 {
    let mut times: Vec<f64> = times.iter().copied().map(of).collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Runs one forward and backward.
fn run(shape: &Shape, function: impl Fn([Tensor<4>; 3]) -> Tensor<4>) -> Times {
    let Shape { device, dtype, batch, length } = shape;
    let sync = || device.sync().unwrap_or_else(|error| panic!("{error:?}"));
    let heads = || {
        let distribution = Distribution::Normal(0.0, 1.0);
        let shape = [*batch, HEADS, *length, WIDTH];
        Tensor::<4>::random(shape, distribution, device).cast(*dtype).detach()
    };
    let tensors = [(); 3].map(|()| heads().require_grad());
    let weights = heads();
    sync();
    let start = Instant::now();
    let output = function(tensors.clone());
    sync();
    let forward = start.elapsed().as_secs_f64();
    let loss = (output * weights).sum();
    sync();
    let start = Instant::now();
    let gradients = loss.backward();
    sync();
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
