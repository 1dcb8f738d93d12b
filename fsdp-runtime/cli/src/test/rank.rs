//! `fsdp test-rank`: one rank of `fsdp test`, or all of them as threads. Trains a small model
//! sharded and unsharded, compares the two, and prints what was compared.

use std::error::Error as StdError;
use std::process::ExitCode;

use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::Device;
use fsdp_runtime::config::{Config, MixedPrecision};
use fsdp_runtime::launch::env::RankEnv;
use fsdp_runtime::prelude::*;

use super::model::{Batch, Model};
use crate::console;

/// Number of training steps.
const STEPS: usize = 6;
const LEARNING_RATE: f64 = 0.05;

type BoxedError = Box<dyn StdError + Send + Sync>;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of ranks: of the processes that were started, or of threads of this one
    #[arg(long)]
    ranks: usize,
}

/// Exits with 1 and the reason if a check fails.
pub(crate) fn run(args: &Args) -> ExitCode {
    match launch_ranks(args.ranks) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            console::err(error);
            ExitCode::FAILURE
        }
    }
}

fn launch_ranks(ranks: usize) -> Result<(), BoxedError> {
    let (mut config, _) = Config::from_env()?.unwrap_or_default();
    config.num_processes = Some(ranks);
    // The units of the program's model are not those of this one.
    let units = std::mem::take(&mut config.fsdp.transformer_layer_cls_to_wrap);
    let started = RankEnv::read()?.map_or(1, |env| env.world.size());
    let (device, on_gpu) = device(&config);
    let engine = match (on_gpu, started > 1) {
        (true, _) => Engine::Nccl,
        (false, true) => Engine::Mpi,
        (false, false) => Engine::Local,
    };
    // Processes without MPI are then refused with what to install.
    let chosen = if engine == Engine::Mpi { Engine::Auto } else { engine };
    let options = LaunchOptions::new(ranks).with_engine(chosen).with_device(device);
    let options = if config.debug { options.with_debug(true) } else { options };
    launch(options, move |worker| -> Result<(), BoxedError> {
        let mut lines = check(&worker, &config)?;
        if worker.is_rank_zero() {
            let form = if started > 1 { "processes" } else { "threads of one process" };
            console::out(format_args!("engine      {engine}: {ranks} ranks as {form}"));
            console::out(format_args!("device      {:?}", worker.device().clone().inner()));
            console::out(format_args!("threads     {} a rank", rayon::current_num_threads()));
            if !units.is_empty() {
                let units = units.join(", ");
                lines.push(format!("not tested  units of your model: {units}"));
            }
            lines.iter().for_each(console::out);
        }
        Ok(())
    })?;
    Ok(())
}

/// Returns the device of the configuration, and whether it is a GPU with NCCL.
fn device(config: &Config) -> (Device, bool) {
    #[cfg(feature = "cuda")]
    if !config.use_cpu && fsdp_runtime::launch::cuda::device_count().is_ok_and(|count| count > 0) {
        return (Device::cuda(0), true);
    }
    let _ = config;
    #[cfg(feature = "flex")]
    return (Device::flex(), false);
    #[allow(unreachable_code, reason = "reached without Flex only")]
    (Device::default(), false)
}

/// The losses of a training run.
struct Losses {
    /// Mean over the ranks of the loss of each step, before its update.
    steps: Vec<f64>,
    /// Loss of the trained model on the batches of all ranks.
    last: f64,
}

/// Runs all checks on this rank. Returns the lines of the report.
fn check(worker: &Worker, config: &Config) -> Result<Vec<String>, BoxedError> {
    let world = worker.world().size();
    let met = of_all_ranks(worker, (worker.rank().index() + 1) as f64)?;
    if (1..=world).map(|number| number as f64).ne(met.iter().copied()) {
        return Err(format!("the ranks gave the numbers {met:?}, not 1 to {world}").into());
    }
    let mut lines = vec![format!("ranks       {world} met and know their numbers")];
    let sharded = sharded(worker, config, &mut lines)?;
    let unsharded = unsharded(worker.device(), world);

    all_equal(&of_all_ranks(worker, sharded.last)?)?;
    let allowed = tolerance(config.mixed_precision);
    let difference = largest_difference(&sharded, &unsharded)?;
    if difference > allowed {
        return Err(format!(
            "the sharded losses differ from the unsharded ones by {difference:.1e}, of which \
             {allowed:.0e} are allowed: {:?} and {:?}",
            sharded.steps, unsharded.steps
        )
        .into());
    }
    let (first, last) = (sharded.steps[0], sharded.last);
    let precision = match config.mixed_precision {
        MixedPrecision::No => "f32",
        other => other.name(),
    };
    lines.push(format!(
        "losses      {first:.6} to {last:.6} in {STEPS} steps: equal on all ranks, bit for bit"
    ));
    lines.push(format!(
        "unsharded   the losses of plain Burn, with a relative difference of at most \
         {difference:.1e} ({allowed:.0e} allowed in {precision})"
    ));
    Ok(lines)
}

/// Returns every rank's value, in rank order.
fn of_all_ranks(worker: &Worker, value: f64) -> Result<Vec<f64>, Error> {
    // Adding zeros changes no bit.
    let mut values = vec![0.0; worker.world().size()];
    values[worker.rank().index()] = value;
    worker.all_reduce_sum(&mut values)?;
    Ok(values)
}

/// Trains the model sharded. Adds lines about the strategy and the memory.
fn sharded(
    worker: &Worker,
    config: &Config,
    lines: &mut Vec<String>,
) -> Result<Losses, BoxedError> {
    let (device, world, rank) = (worker.device(), worker.world().size(), worker.rank().index());
    let options = config.options::<Model>()?;
    let mut model = fully_shard(Model::new(device), worker, options)?;
    let mut optimizer = SgdConfig::new().init();
    let mut steps = Vec::new();
    let batch = Batch::new(rank..rank + 1, device);
    for _ in 0..STEPS {
        let loss = batch.loss(&model);
        let own = f64::from(loss.clone().into_scalar::<f32>());
        steps.push(of_all_ranks(worker, own)?.iter().sum::<f64>() / world as f64);
        let gradients = model.backward(loss)?;
        model = optimizer.step(LEARNING_RATE, model, gradients);
    }
    let last = Batch::new(0..world, device).loss(&model.valid()).into_scalar::<f32>();

    let stats = model.stats();
    let (mesh, counts) = (stats.mesh(), stats.counts());
    let groups = match (mesh.shard_size().size(), mesh.replicas().size()) {
        (size, 1) => format!("one group of {size} ranks"),
        (size, groups) => format!("{groups} groups of {size} ranks"),
    };
    let (strategy, units) = (config.fsdp.sharding_strategy, stats.wrapping().units.len());
    lines.push(format!("strategy    {strategy}: {units} units, {groups}"));
    let full = stats.num_params() * size_of::<f32>();
    let most = of_all_ranks(worker, stats.sharded_bytes() as f64)?.into_iter().fold(0.0, f64::max);
    if strategy.shards() && mesh.shard_size().size() > 1 && most >= full as f64 {
        return Err(format!("a rank stores {most} bytes of {full}: nothing is sharded").into());
    }
    lines.push(format!(
        "memory      {most} of {full} bytes of parameters on each rank, at most {} gathered",
        stats.peak_unsharded_bytes()
    ));
    lines.push(format!(
        "collectives {} all-gathers and {} reductions on rank 0, {} bytes sent",
        counts.all_gathers,
        counts.reduce_scatters + counts.all_reduces,
        counts.sent_bytes
    ));
    Ok(Losses { steps, last: f64::from(last) })
}

/// Trains the model with plain Burn, on the batches of all ranks.
fn unsharded(device: &Device, world: usize) -> Losses {
    let mut model = Model::new(device);
    let mut optimizer = SgdConfig::new().init();
    let mut steps = Vec::new();
    let batch = Batch::new(0..world, device);
    for _ in 0..STEPS {
        let loss = batch.loss(&model);
        steps.push(f64::from(loss.clone().into_scalar::<f32>()));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(LEARNING_RATE, model, gradients);
    }
    let last = batch.loss(&model).into_scalar::<f32>();
    Losses { steps, last: f64::from(last) }
}

/// Checks that all ranks have one loss, in every bit.
fn all_equal(losses: &[f64]) -> Result<(), String> {
    let differs = |(rank, loss): (usize, &f64)| {
        (loss.to_bits() != losses[0].to_bits())
            .then(|| format!("the loss of rank {rank} is {loss}, that of rank 0 {}", losses[0]))
    };
    losses.iter().enumerate().find_map(differs).map_or(Ok(()), Err)
}

/// Returns the largest relative difference of two runs. An error if a loss is not finite, or does
/// not fall.
fn largest_difference(sharded: &Losses, unsharded: &Losses) -> Result<f64, String> {
    let losses = |run: &Losses| run.steps.iter().copied().chain([run.last]).collect::<Vec<f64>>();
    let (sharded, unsharded) = (losses(sharded), losses(unsharded));
    if !sharded.iter().all(|loss| loss.is_finite()) || sharded.last() >= sharded.first() {
        return Err(format!("the loss does not fall: {sharded:?}"));
    }
    let relative = |(a, b): (&f64, &f64)| (a - b).abs() / b.abs().max(f64::MIN_POSITIVE);
    Ok(sharded.iter().zip(&unsharded).map(relative).fold(0.0, f64::max))
}

/// Returns the relative difference that the precision explains. The two runs add up their items in
/// other orders.
const fn tolerance(precision: MixedPrecision) -> f64 {
    match precision {
        MixedPrecision::No => 1e-4,
        MixedPrecision::Fp16 => 5e-3,
        MixedPrecision::Bf16 | MixedPrecision::Fp8 => 3e-2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn losses(steps: &[f64], last: f64) -> Losses {
        Losses { steps: steps.to_vec(), last }
    }

    #[test]
    fn a_loss_that_differs_is_found() {
        assert!(all_equal(&[0.5, 0.5, 0.5]).is_ok());
        let error = all_equal(&[0.5, 0.5, 0.5 + f64::EPSILON]).unwrap_err();
        assert!(error.starts_with("the loss of rank 2 is 0.5"), "{error}");
        let one = losses(&[1.0, 0.5], 0.25);
        assert_eq!(largest_difference(&one, &one), Ok(0.0));
        let other = losses(&[1.0, 0.4], 0.25);
        assert!((largest_difference(&one, &other).unwrap() - 0.25).abs() < 1e-12);
        let last = losses(&[1.0, 0.5], 0.2);
        assert!(largest_difference(&one, &last).unwrap() > 0.2);
        for broken in [losses(&[1.0, f64::NAN], 0.5), losses(&[1.0, 1.0], 1.0)] {
            assert!(largest_difference(&broken, &one).is_err());
        }
    }

    /// The checks themselves are sharp: ranks that train on other data than they should differ from
    /// the unsharded run by more than is allowed.
    #[test]
    fn training_on_part_of_the_data_exceeds_the_tolerance() {
        let device = device(&Config::default()).0.autodiff();
        let (all, part) = (unsharded(&device, 2), unsharded(&device, 1));
        let difference = largest_difference(&all, &part).unwrap();
        for precision in MixedPrecision::ALL {
            assert!(difference > tolerance(*precision), "{precision}: {difference}");
        }
    }
}
