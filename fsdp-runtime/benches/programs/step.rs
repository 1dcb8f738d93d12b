//! Time of one training step of a BERT, unsharded and under several strategies.
//!
//! `cargo bench --bench step -- --world 1,2,4`, with `--checkpoint` for the cost of recomputation
//! and `--offload` for that of parameters and optimizer state on the host. With `--shares` it prints
//! which work takes the processor's time, and the bytes that this work must read and write.
//!
//! All variants take turns in each round, so that other load on the machine affects all of them.
//! Times are medians over all rounds, of the slowest rank. The model is that of `torch_bert.py`,
//! and `vs_torch.sh` compares the two.

use std::time::{Duration, Instant};

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use clap::Parser;
use fsdp_runtime::Error;
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;

#[path = "../common/bert.rs"]
mod bert;
#[path = "../common/bert_bytes.rs"]
mod bert_bytes;
#[path = "../common/shares.rs"]
mod shares;

use crate::allocator;

use bert::{BF16, Batch, Bert, Layer, Sizes};
use bert_bytes::least_bytes;

/// Time of one training step of a BERT.
#[derive(Clone, Debug, Parser)]
struct Cli {
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4")]
    world: Vec<usize>,
    /// Runs only the variants whose name contains this text.
    #[arg(long, default_value = "")]
    only: String,
    /// Runs only the variants with these names.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    variants: Vec<String>,
    #[command(flatten)]
    sizes: Sizes,
    /// Steps of a round. The first two of each round are not counted.
    #[arg(long, default_value_t = 6)]
    steps: usize,
    /// Number of rounds, each of which runs every variant once.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Also measures FULL_SHARD with every layer recomputed.
    #[arg(long)]
    checkpoint: bool,
    /// Also measures FULL_SHARD with parameters and optimizer state on the host.
    #[arg(long)]
    offload: bool,
    /// Also measures FULL_SHARD with a wait for the device after each step.
    #[arg(long)]
    sync: bool,
    /// CubeCL's CPU runtime in place of Flex.
    #[arg(long, conflicts_with = "cuda")]
    cubecl_cpu: bool,
    /// The CUDA device with this index, and over NCCL, in place of Flex.
    #[arg(long, value_name = "INDEX")]
    cuda: Option<usize>,
    /// Parameters and products in bf16; gradients are reduced in f32.
    #[arg(long)]
    bf16: bool,
    /// The system's allocator in place of mimalloc, set up by `launch` as in a program without code
    /// for its allocator.
    #[arg(long)]
    system_allocator: bool,
    /// Prints for each variant which work takes the processor's time. Needs Linux's `perf`.
    #[arg(long)]
    shares: bool,
    /// Prints one line for each variant: the median step in seconds.
    #[arg(long)]
    brief: bool,
    /// Prints one JSON object for each variant: medians in seconds, and the losses of each round.
    #[arg(long, conflicts_with = "brief")]
    json: bool,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// The times of one step in seconds, and its loss.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    forward: f64,
    backward: f64,
    optimizer: f64,
    /// Time that the host took to issue the step, without the wait for the loss. On a device that computes
    /// while the host goes on, the rest of the step is a wait for the device.
    host: f64,
    /// Time of collectives on the communication thread.
    collectives: f64,
    /// Time for which the rank waited for collectives.
    waited: f64,
    loss: f64,
}

impl Times {
    fn passes(&self) -> f64 {
        self.forward + self.backward
    }

    fn step(&self) -> f64 {
        self.passes() + self.optimizer
    }
}

/// A variant of training.
#[derive(Clone, Debug)]
struct Way {
    name: &'static str,
    /// `None`: each rank trains a model of its own.
    options: Option<FsdpOptions>,
    /// Whether the rank waits for the device after each step.
    sync: bool,
}

fn ways(cli: &Cli) -> Vec<Way> {
    let full = FsdpOptions::new;
    let way = |name, options| Way { name, options, sync: false };
    let mut ways = vec![
        way("unsharded", None),
        way("NO_SHARD", Some(full().with_strategy(ShardingStrategy::NoShard))),
        way("FULL_SHARD", Some(full())),
        way("SHARD_GRAD_OP", Some(full().with_strategy(ShardingStrategy::ShardGradOp))),
        way(
            "FULL_SHARD prefetch after",
            Some(full().with_backward_prefetch(BackwardPrefetch::Post)),
        ),
        way(
            "FULL_SHARD no prefetch",
            Some(
                full().with_backward_prefetch(BackwardPrefetch::None).with_forward_prefetch(false),
            ),
        ),
    ];
    if cli.checkpoint {
        let layers = ActivationCheckpointing::Units(unit_types![Layer]);
        ways.push(way("FULL_SHARD checkpoint", Some(full().with_activation_checkpointing(layers))));
    }
    if cli.offload {
        let params = OffloadPolicy::Params { pin_memory: true };
        ways.push(way("FULL_SHARD offload", Some(full().with_offload(params))));
        let optimizer = OffloadPolicy::OptimizerOnly;
        ways.push(way("FULL_SHARD offload optimizer", Some(full().with_offload(optimizer))));
    }
    if cli.sync {
        ways.push(Way { sync: true, ..way("FULL_SHARD synced", Some(full())) });
    }
    ways
}

/// Times `cli.steps` steps, and drops the first two. `backward` gets the loss that `forward`
/// returns, and `end` runs after each step. With a name and bytes of kinds of work, prints the shares of the steps that
/// are not dropped.
fn time<M: Module>(
    cli: &Cli,
    shares_of: Option<&(String, Vec<(&str, usize)>)>,
    mut model: M,
    forward: impl Fn(&M) -> Tensor<1>,
    backward: impl Fn(&M, Tensor<1>) -> Result<GradientsParams, Error>,
    communication: impl Fn(&M) -> (Duration, Duration),
    end: impl Fn(),
) -> Result<Vec<Times>, Error> {
    let mut optimizer = AdamWConfig::new().init();
    let mut times = Vec::new();
    let steps = cli.steps.max(3);
    let mut sampling = None;
    for step in 0..steps {
        if step == 2 && shares_of.is_some() {
            sampling = Some(shares::Sampling::start());
        }
        let (before, waited) = communication(&model);
        let start = Instant::now();
        let loss = forward(&model);
        let issued = start.elapsed();
        // The loss is read on the host, as in a training loop.
        let value = f64::from(loss.clone().into_scalar::<f32>());
        let forwarded = Instant::now();
        let gradients = backward(&model, loss)?;
        let backwarded = Instant::now();
        model = optimizer.step(1e-5, model, gradients);
        let host = issued + forwarded.elapsed();
        end();
        let (after, waited_after) = communication(&model);
        times.push(Times {
            forward: (forwarded - start).as_secs_f64(),
            backward: (backwarded - forwarded).as_secs_f64(),
            optimizer: backwarded.elapsed().as_secs_f64(),
            host: host.as_secs_f64(),
            collectives: (after - before).as_secs_f64(),
            waited: (waited_after - waited).as_secs_f64(),
            loss: value,
        });
    }
    if let (Some(sampling), Some((name, bytes))) = (sampling, shares_of) {
        sampling.print(name, steps - 2, bytes);
    }
    Ok(times.split_off(2))
}

/// Returns whether a rank's optimizer steps a shard of the parameters.
fn is_sharded(way: &Way) -> bool {
    way.options.is_some() && way.name != "NO_SHARD"
}

fn launch_options(cli: &Cli, world: usize) -> LaunchOptions {
    let options = LaunchOptions::new(world);
    match cli.cuda {
        #[cfg(feature = "cpu")]
        None if cli.cubecl_cpu => options.with_device(Device::cpu()),
        #[cfg(not(feature = "cpu"))]
        None if cli.cubecl_cpu => panic!("--cubecl-cpu needs `--features cpu`"),
        None => options.with_device(Device::flex()),
        #[cfg(feature = "cuda")]
        Some(index) => {
            fsdp_runtime::launch::cuda::require_device(index)
                .unwrap_or_else(|error| panic!("{error}"));
            options.with_device(Device::cuda(index)).with_engine(Engine::Nccl)
        }
        #[cfg(not(feature = "cuda"))]
        Some(_) => panic!("--cuda needs `--features cuda`"),
    }
}

/// Returns the steps of one round, each as measured on the slowest rank, with the losses of rank 0.
fn round(cli: &Cli, world: usize, way: &Way) -> Vec<Times> {
    let (job, options, sync) = (cli.clone(), way.options.clone(), way.sync);
    let shares = cli.shares.then(|| {
        let element = if cli.bf16 { 2 } else { 4 };
        let bytes = least_bytes(&cli.sizes, world, is_sharded(way), element);
        (format!("{} on {world} ranks", way.name), bytes)
    });
    let options =
        options.map(|options| if cli.bf16 { options.with_mixed_precision(BF16) } else { options });
    let ranks = launch(launch_options(cli, world), move |worker| {
        let device = worker.device();
        let end = || {
            if sync {
                device.sync().expect("the device has run the step");
            }
        };
        let data = Batch::new(&job.sizes, worker.rank().index(), device);
        let model = Bert::new(&job.sizes, device);
        let shares_of = shares.as_ref().filter(|_| worker.rank() == Rank::ZERO);
        match &options {
            None => time(
                &job,
                shares_of,
                model,
                |model| data.loss(model),
                |model, loss| Ok(GradientsParams::from_grads(loss.backward(), model)),
                |_| Default::default(),
                end,
            ),
            Some(options) => time(
                &job,
                shares_of,
                fully_shard(model, &worker, options.clone().with_seed(0))?,
                |model| data.loss(model),
                Fsdp::backward,
                |model| model.stats().communication_time(),
                end,
            ),
        }
    })
    .unwrap_or_else(|error| panic!("{}: {error}", way.name));
    let steps = 0..ranks[0].len();
    let slowest = |step: usize| {
        let times = ranks.iter().map(|rank| rank[step]);
        let slowest = times.max_by(|a, b| a.step().total_cmp(&b.step()));
        Times { loss: ranks[0][step].loss, ..slowest.expect("at least one rank") }
    };
    steps.map(slowest).collect()
}

fn median(times: &[Times], of: impl Fn(&Times) -> f64) -> f64 {
    let mut values: Vec<f64> = times.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints a variant as one JSON object on one line.
fn print_json(cli: &Cli, world: usize, way: &Way, times: &[Times]) {
    let of = |part: fn(&Times) -> f64| median(times, part);
    let rounds = times.chunks(times.len() / cli.rounds);
    let losses = rounds.map(|round| round.iter().map(|times| times.loss).collect());
    let losses: Vec<Vec<f64>> = losses.collect();
    let result = serde_json::json!({
        "variant": way.name,
        "world": world,
        "step": of(Times::step),
        "forward": of(|times| times.forward),
        "backward": of(|times| times.backward),
        "optimizer": of(|times| times.optimizer),
        "host": of(|times| times.host),
        "losses": losses,
    });
    println!("{result}");
}

/// Returns the variants that the arguments select.
fn selected(cli: &Cli) -> Vec<Way> {
    let mut ways = ways(cli);
    ways.retain(|way| way.name.contains(&cli.only));
    ways.retain(|way| cli.variants.is_empty() || cli.variants.iter().any(|name| name == way.name));
    ways
}

pub fn main() {
    let cli = Cli::parse();
    allocator::choose(cli.system_allocator);
    let ways = selected(&cli);
    for &world in &cli.world {
        let mut times: Vec<Vec<Times>> = vec![Vec::new(); ways.len()];
        for _ in 0..cli.rounds {
            for (way, times) in ways.iter().zip(&mut times) {
                times.extend(round(&cli, world, way));
            }
        }
        if cli.json {
            ways.iter().zip(&times).for_each(|(way, times)| print_json(&cli, world, way, times));
            continue;
        }
        if cli.brief {
            for (way, times) in ways.iter().zip(&times) {
                println!("{:.4}", median(times, Times::step));
                eprintln!("{} on {world} ranks", way.name);
            }
            continue;
        }
        println!(
            "\n{world} ranks, batch {} each; ratios to NO_SHARD of steps and of passes, seconds\n\
             {:<28}{:>7}{:>7}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}",
            cli.sizes.batch,
            "",
            "steps",
            "passes",
            "step",
            "forward",
            "backward",
            "adamw",
            "host",
            "collect.",
            "waited",
        );
        let no_shard = ways.iter().position(|way| way.name == "NO_SHARD").unwrap_or(0);
        let base = |of: fn(&Times) -> f64| median(&times[no_shard], of);
        let base = (base(Times::step), base(Times::passes));
        for (way, times) in ways.iter().zip(&times) {
            let of = |part: fn(&Times) -> f64| median(times, part);
            println!(
                "{:<28}{:>7.3}{:>7.3}{:>9.4}{:>9.4}{:>9.4}{:>9.4}{:>9.4}{:>9.4}{:>9.4}",
                way.name,
                of(Times::step) / base.0,
                of(Times::passes) / base.1,
                of(Times::step),
                of(|times| times.forward),
                of(|times| times.backward),
                of(|times| times.optimizer),
                of(|times| times.host),
                of(|times| times.collectives),
                of(|times| times.waited),
            );
        }
    }
}
