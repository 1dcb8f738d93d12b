//! Number of kernel launches in one training step of a BERT on a CubeCL device, and of waits.
//!
//! `cargo bench --features cpu --bench launches`, with `--features cpu,fusion` for Burn's fusion,
//! and `-- --kernels` for the launches of each kernel. BERT-base is
//! `-- --layers 12 --hidden 768 --inner 3072`; the number of launches depends on the number of
//! layers.
//!
//! The device is Burn's default one where `BURN_DEVICE` names it, else `cpu` if it is compiled in.
//!
//! Kernels are compiled but not run, except with `--run`; on a CPU the compilation takes minutes.
//! Waits depend on how far ranks are apart, so `--steps` shows those of several steps. Launches of the ranks'
//! communication threads are counted apart from those of all other threads.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use burn::optim::GradientsParams;
use burn::tensor::Device;
use clap::Parser;
use cubecl_runtime::config::{TypeNameFormatLevel, type_name_format};
use cubecl_runtime::dry_run::DryRun;
use cubecl_runtime::logging::{LaunchObservation, LaunchObserver};
use fsdp_runtime::Error;
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;

#[path = "common/bert.rs"]
mod bert;

use bert::{BF16, Batch, Bert, Sizes};

/// Number of kernel launches in one training step of a BERT.
#[derive(Clone, Debug, Parser)]
struct Cli {
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    world: Vec<usize>,
    #[command(flatten)]
    sizes: Sizes,
    /// Steps before the one that is counted.
    #[arg(long, default_value_t = 2)]
    warm_up: usize,
    /// Steps whose waits are counted. The launches are those of the last one.
    #[arg(long, default_value_t = 1)]
    steps: usize,
    /// Runs the kernels.
    #[arg(long)]
    run: bool,
    /// Also prints the launches of each kernel.
    #[arg(long)]
    kernels: bool,
    /// Trains with parameters and products in bf16.
    #[arg(long)]
    bf16: bool,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Launches of each kernel, of communication threads and of all others.
#[derive(Clone, Debug, Default)]
struct Launches([BTreeMap<&'static str, usize>; 2]);

impl Launches {
    fn total(&self) -> [usize; 2] {
        self.0.each_ref().map(|kernels| kernels.values().sum())
    }
}

#[derive(Default)]
struct Count(Mutex<Launches>);

impl LaunchObserver for Count {
    fn launched(&self, kernel: &'static str) {
        let thread = std::thread::current();
        let is_communication = thread.name().is_some_and(|name| name.starts_with("fsdp-comm"));
        let mut launches = self.0.lock().expect("no thread panics under the lock");
        *launches.0[usize::from(is_communication)].entry(kernel).or_default() += 1;
    }
}

/// Counts of one step.
struct Step {
    /// Launches of all ranks.
    launches: Launches,
    /// Number of times that the rank blocked on its communication thread, in each step.
    waits: Vec<usize>,
    drains: usize,
    lowerings: usize,
}

#[allow(clippy::needless_return, reason = "which device is a matter of features")]
fn device() -> Device {
    if std::env::var_os("BURN_DEVICE").is_some() {
        return Device::default();
    }
    #[cfg(feature = "cpu")]
    return Device::cpu();
    #[cfg(all(feature = "wgpu", not(feature = "cpu")))]
    return Device::wgpu(burn::tensor::DeviceKind::DefaultDevice);
    #[cfg(not(any(feature = "cpu", feature = "wgpu")))]
    return Device::cuda(0);
}

/// Runs `step` several times, and returns the launches of the last call.
fn observe(
    cli: &Cli,
    worker: &Worker,
    mut step: impl FnMut() -> Result<(), Error>,
) -> Result<Launches, Error> {
    let observer = Arc::new(Count::default());
    let calls = cli.warm_up + cli.steps;
    for call in 0..calls {
        worker.barrier()?;
        let is_counted = worker.is_rank_zero() && call + 1 == calls;
        let observation = is_counted.then(|| LaunchObservation::new(observer.clone()));
        // All ranks start after the observation, and end before it does.
        worker.barrier()?;
        step()?;
        worker.device().sync().expect("the device has run the step");
        worker.barrier()?;
        drop(observation);
    }
    let launches = observer.0.lock().expect("no thread panics under the lock").clone();
    Ok(launches)
}

/// Counts a step of the model without sharding, on each rank.
fn unsharded(cli: &Cli, worker: &Worker) -> Result<Step, Error> {
    let batch = Batch::new(&cli.sizes, worker.rank().index(), worker.device());
    let mut optimizer = AdamWConfig::new().init();
    let mut model = Some(Bert::new(&cli.sizes, worker.device()));
    let launches = observe(cli, worker, || {
        let unsharded = model.take().expect("each step puts the model back");
        let gradients = batch.loss(&unsharded).backward();
        let gradients = GradientsParams::from_grads(gradients, &unsharded);
        model = Some(optimizer.step(1e-5, unsharded, gradients));
        Ok(())
    })?;
    Ok(Step { launches, waits: vec![0], drains: 0, lowerings: 0 })
}

/// Counts a step of the model under FULL_SHARD.
fn sharded(cli: &Cli, worker: &Worker) -> Result<Step, Error> {
    let batch = Batch::new(&cli.sizes, worker.rank().index(), worker.device());
    let mut optimizer = AdamWConfig::new().init();
    // The check steps probes and reads them: kernels that do not run never pass it.
    let options = FsdpOptions::new().with_seed(0).with_optimizer_check(false);
    let options = if cli.bf16 { options.with_mixed_precision(BF16) } else { options };
    let mut model = Some(fully_shard(Bert::new(&cli.sizes, worker.device()), worker, options)?);
    let (mut waits, mut drains, mut lowerings) = (Vec::new(), 0, 0);
    let launches = observe(cli, worker, || {
        let sharded = model.take().expect("each step puts the model back");
        let (waits_before, before) = (sharded.stats().waits(), sharded.stats().counts());
        let gradients = sharded.backward(batch.loss(&sharded))?;
        let sharded = optimizer.step(1e-5, sharded, gradients);
        let after = sharded.stats().counts();
        waits.push(sharded.stats().waits() - waits_before);
        (drains, lowerings) = (after.drains - before.drains, after.lowerings - before.lowerings);
        model = Some(sharded);
        Ok(())
    })?;
    let waits = waits.split_off(cli.warm_up);
    Ok(Step { launches, waits, drains, lowerings })
}

fn main() {
    let cli = Cli::parse();
    println!(
        "{:<12}{:>6}{:>10}{:>16}{:>7}{:>8}{:>11}",
        "", "ranks", "launches", "communication", "waits", "drains", "lowerings"
    );
    let _dry_run = (!cli.run).then(DryRun::new);
    type Way = fn(&Cli, &Worker) -> Result<Step, Error>;
    for &world in &cli.world {
        for (name, way) in [("unsharded", unsharded as Way), ("FULL_SHARD", sharded)] {
            let job = cli.clone();
            let options = LaunchOptions::new(world).with_device(device());
            let ranks = launch(options, move |worker| way(&job, &worker));
            let ranks = ranks.unwrap_or_else(|error| panic!("{name}: {error}"));
            let step = &ranks[0];
            let [own, communication] = step.launches.total().map(|launches| launches / world);
            println!(
                "{name:<12}{world:>6}{:>10}{communication:>16}{:>7}{:>8}{:>11}",
                own + communication,
                step.waits.iter().max().copied().unwrap_or_default(),
                step.drains,
                step.lowerings
            );
            if cli.steps > 1 {
                for (rank, step) in ranks.iter().enumerate() {
                    println!("    waits of rank {rank} in each step: {:?}", step.waits);
                }
            }
            if cli.kernels {
                print_kernels(&step.launches);
            }
        }
    }
}

/// Prints the launches of each kernel in all ranks, most first.
fn print_kernels(launches: &Launches) {
    for (thread, kernels) in ["own", "communication"].iter().zip(&launches.0) {
        let mut kernels: Vec<_> = kernels.iter().collect();
        kernels.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        for (kernel, count) in kernels {
            let kernel = type_name_format(kernel, TypeNameFormatLevel::Balanced);
            println!("    {count:>6} {thread:<14}{kernel}");
        }
    }
}
