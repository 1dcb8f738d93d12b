//! Time of a training step, planned and measured, over numbers of thread ranks.
//!
//! `cargo bench --bench scale -- --world 1,2,4,8 --calibrate 2`
//!
//! The processor's speed is calculated from the measured step of one number of ranks. The steps of
//! the others are predicted with it. Numbers of ranks take turns in each round, so that other load on
//! the machine affects all of them. Times are medians over all rounds, of the slowest rank.

use std::time::Instant;

use burn::tensor::Device;
use clap::Parser;
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::plan::{Batch as StepBatch, Cluster, StepPlan};
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Mesh, Rank, WorldSize};

#[path = "common/allocator.rs"]
mod allocator;
#[path = "common/bert.rs"]
#[allow(dead_code, reason = "other benches use more of the model")]
mod bert;

use bert::{Batch, Bert, Sizes};

/// Time of a training step of a BERT, planned and measured.
#[derive(Clone, Debug, Parser)]
struct Cli {
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8")]
    world: Vec<usize>,
    /// Number of ranks from which the processor's speed is calculated.
    #[arg(long, default_value_t = 2)]
    calibrate: usize,
    /// Sharding strategy.
    #[arg(long, default_value = "FULL_SHARD")]
    strategy: ShardingStrategy,
    #[command(flatten)]
    sizes: Sizes,
    /// Steps of a round. The first two of each round are not counted.
    #[arg(long, default_value_t = 6)]
    steps: usize,
    /// Number of rounds, each of which runs every number of ranks once.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Cli {
    fn options(&self) -> FsdpOptions {
        FsdpOptions::new().with_strategy(self.strategy).with_seed(0).with_optimizer_check(false)
    }

    fn plan(&self, world: usize) -> StepPlan {
        let world = WorldSize::new(world).expect("at least one rank");
        let model = Bert::new(&self.sizes, &Device::flex());
        let mesh = Mesh::new(Rank::ZERO, world);
        let plan = StepPlan::new(&model, mesh, &self.options()).expect("the model can be sharded");
        plan.with_lookups(&["tokens.weight", "positions.weight"]).with_attention(
            "Layer",
            self.sizes.hidden,
            false,
        )
    }
}

/// Returns the seconds of the steps of one round, each on the slowest rank.
fn round(cli: &Cli, world: usize) -> Vec<f64> {
    let job = cli.clone();
    let options = LaunchOptions::new(world).with_device(Device::flex());
    let ranks = launch(options, move |worker| {
        let device = worker.device();
        let data = Batch::new(&job.sizes, worker.rank().index(), device);
        let model = Bert::new(&job.sizes, device);
        let mut model = fully_shard(model, &worker, job.options())?;
        let mut optimizer = AdamWConfig::new().init();
        let mut times = Vec::new();
        for _ in 0..job.steps.max(3) {
            let start = Instant::now();
            let gradients = model.backward(data.loss(&model))?;
            model = optimizer.step(1e-5, model, gradients);
            times.push(start.elapsed().as_secs_f64());
        }
        Ok::<_, Error>(times.split_off(2))
    });
    let ranks = ranks.unwrap_or_else(|error| panic!("{world} ranks: {error}"));
    let slowest = |step: usize| ranks.iter().map(|rank| rank[step]).fold(0.0, f64::max);
    (0..ranks[0].len()).map(slowest).collect()
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Returns the bytes per second at which this processor copies, read and written bytes together.
fn bandwidth() -> f64 {
    let from = vec![1u8; 256 << 20];
    let mut to = vec![0u8; from.len()];
    let mut times = Vec::new();
    for _ in 0..5 {
        let start = Instant::now();
        to.copy_from_slice(std::hint::black_box(&from));
        times.push(start.elapsed().as_secs_f64());
        std::hint::black_box(&to);
    }
    2.0 * from.len() as f64 / median(&mut times)
}

fn main() {
    let cli = Cli::parse();
    allocator::choose(false);
    let mut worlds = cli.world.clone();
    if !worlds.contains(&cli.calibrate) {
        worlds.push(cli.calibrate);
    }
    let mut times = vec![Vec::new(); worlds.len()];
    for _ in 0..cli.rounds {
        for (world, times) in worlds.iter().zip(&mut times) {
            times.extend(round(&cli, *world));
        }
    }
    let measured: Vec<f64> = times.iter_mut().map(|times| median(times)).collect();
    let batch = StepBatch::new(cli.sizes.batch, cli.sizes.length);
    let known = worlds.iter().position(|world| *world == cli.calibrate).expect("measured");
    // The peak only has to be above what the processor reaches.
    let processor = Cluster::processor(1e13, bandwidth(), usize::MAX);
    let cluster = cli.plan(cli.calibrate).calibrated(batch, &processor, measured[known]);
    let speed = cluster.accelerator.efficiency * cluster.accelerator.single_flops;
    println!(
        "{}, {:.1} GFLOP/s from the step of {} ranks, copies at {:.1} GB/s\n{:>6}{:>12}{:>12}{:>10}",
        cli.strategy,
        speed / 1e9,
        cli.calibrate,
        cluster.inside.bandwidth / 1e9,
        "ranks",
        "measured",
        "planned",
        "error"
    );
    for (world, measured) in worlds.iter().zip(&measured) {
        let planned = cli.plan(*world).estimate(batch, &cluster).step;
        let error = 100.0 * (planned / measured - 1.0);
        println!("{world:>6}{:>9.1} ms{:>9.1} ms{error:>9.1} %", measured * 1e3, planned * 1e3);
    }
}
