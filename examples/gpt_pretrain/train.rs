//! One rank's run: build the model, shard it, train it, evaluate it.

use std::time::Instant;

use anyhow::{Result, ensure};
use burn::module::ParamGroup;
use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::optim::ModuleOptimizer;
use burn::tensor::{Device, FloatDType, Tensor};
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::{GradScalerConfig, MemoryForecast};

use crate::arch::{Arch, KeptBlocks};
use crate::batch::{Blocks, Dealer};
use crate::cli::{Precision, Recipe};
use crate::log::{Log, Place, Update};
use crate::model::{Block, Gpt, GptConfig};
use crate::report::Summary;
use crate::room::free_on;

/// Floats of state that AdamW holds for each parameter.
pub const ADAM_MOMENTS: usize = 2;

/// The model and how it is trained, whatever the text; the same for every rank.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The model's size.
    pub arch: Arch,
    /// What is sharded.
    pub strategy: ShardingStrategy,
    /// Whether gathered parameters go between forward and backward, where the strategy lets them.
    pub reshard_after_forward: bool,
    /// Whether parameters, gradients and optimizer state rest on the host.
    pub cpu_offload: bool,
    /// How to train.
    pub recipe: Recipe,
}

/// Everything a run needs; the same for every rank.
#[derive(Clone, Debug)]
pub struct Job {
    /// The model, and how to train it.
    pub setup: Setup,
    /// Trained on.
    pub train: Blocks,
    /// Evaluated on.
    pub held_out: Blocks,
    /// A bigram model's perplexity of the held-out text.
    pub bigram: f64,
    /// Whether log lines are printed.
    pub log: bool,
}

impl Setup {
    /// The model, of which no value is drawn yet.
    pub fn model(&self, device: &Device) -> Gpt {
        let Recipe { tokens_per_sample: positions, dropout, .. } = self.recipe;
        GptConfig { arch: self.arch, positions, dropout }.init(device)
    }

    /// How the model is sharded.
    pub fn options(&self) -> FsdpOptions {
        let options = FsdpOptions::new().with_strategy(self.strategy).with_seed(self.recipe.seed);
        let options = match self.reshard_after_forward {
            true => options,
            false => options.with_reshard_after_forward(ReshardAfterForward::Never),
        };
        let options = match self.recipe.precision.dtype() {
            FloatDType::F32 => options,
            dtype => {
                let policy = MixedPrecisionPolicy::new().with_param_dtype(dtype);
                options.with_mixed_precision(policy.with_output_dtype(FloatDType::F32))
            }
        };
        let options = match self.recipe.kept_blocks {
            KeptBlocks::Whole => options,
            kept => options
                .with_activation_checkpointing(ActivationCheckpointing::Units(unit_types![Block]))
                .with_offload_activations(kept == KeptBlocks::OnHost),
        };
        match self.cpu_offload {
            true => options.with_offload(OffloadPolicy::Params { pin_memory: true }),
            false => options,
        }
    }
}

/// Trains and evaluates; what one rank of [`launch`] runs. Every rank gets the same summary but for
/// the times and the bytes, which are its own.
///
/// # Errors
///
/// If the recipe does not fit the text, a peer fails, or the loss is no longer a number.
pub fn train(job: &Job, forecast: &MemoryForecast, worker: &Worker) -> Result<Summary> {
    let Setup { recipe, arch, strategy, .. } = &job.setup;
    let rank = worker.rank().index();
    let dealer = Dealer {
        world_size: worker.world().size(),
        batch_size: recipe.batch_size,
        update_freq: recipe.update_freq,
    };
    let per_epoch = dealer.updates_per_epoch(job.train.len())?;
    let total = recipe.updates(per_epoch);
    let schedule = recipe.schedule(total);
    let max_norm = if recipe.clip_norm > 0.0 { recipe.clip_norm } else { f64::INFINITY };

    let mut model = fully_shard(job.setup.model(worker.device()), worker, job.setup.options())?;
    let mut optimizer = optimizer(recipe);
    let loss_of = CrossEntropyLossConfig::new().init(worker.device());
    let mut scaler = recipe.precision.scaler()?;
    let mut log = Log::new(dealer.per_update(), recipe.tokens_per_sample, recipe.clip_norm);
    let mut losses = Vec::with_capacity(total);
    let (mut logged, mut skipped, mut train_loss) = (0, 0, 0.0);
    let mut seconds = Vec::with_capacity(total);
    let mut order = Vec::new();

    while losses.len() < total {
        // An overflow uses its batch up, and is no update: on every rank.
        let taken = losses.len() + skipped;
        let (epoch, at) = (taken / per_epoch, taken % per_epoch);
        if at == 0 {
            order = dealer.epoch(job.train.len(), recipe.seed, epoch);
        }
        let begin = Instant::now();
        let mut value = 0.0;
        for batch in 1..recipe.update_freq {
            let rows = dealer.share(&order, at, batch - 1, rank);
            let (loss, found) = forward(&model, &loss_of, job, rows, worker.device());
            model.accumulate(scaled(loss, scaler.as_ref()))?;
            value += number(found)?;
        }
        let rows = dealer.share(&order, at, recipe.update_freq - 1, rank);
        let (loss, found) = forward(&model, &loss_of, job, rows, worker.device());
        let gradients = model.backward(scaled(loss, scaler.as_ref()))?;
        let gradients = match &mut scaler {
            Some(scaler) => scaler.unscale(&model, gradients)?,
            None => Unscaled::Finite(gradients),
        };
        let mut gradients = match gradients {
            Unscaled::Finite(gradients) => gradients,
            Unscaled::Overflow => {
                skipped += 1;
                recipe.precision.check_scale(scaler.as_ref(), losses.len())?;
                let took = begin.elapsed().as_secs_f64();
                seconds.push(took);
                log.overflow(took);
                continue;
            }
        };
        let norm = model.clip_grad_norm(&mut gradients, max_norm)?;
        model = optimizer.step(schedule.rate(losses.len()), model, gradients);
        value += number(found)?;
        ensure!(
            value.is_finite(),
            "the loss of update {} is {value}; a lower --lr may help",
            losses.len() + 1
        );
        losses.push(value / std::f64::consts::LN_2);
        let took = begin.elapsed().as_secs_f64();
        seconds.push(took);
        log.update(Update { norm, seconds: took });
        if losses.len() == 1 {
            // From here on the optimizer has its state.
            model.stats().record_optimizer(&optimizer)?;
        }
        let updates = losses.len();
        if updates.is_multiple_of(recipe.log_interval) || updates == total {
            let since = &mut losses[logged..];
            mean_over_ranks(since, worker)?;
            train_loss = since.iter().sum::<f64>() / since.len() as f64;
            logged = updates;
            if job.log && rank == 0 {
                let (batches, lr) = (updates + skipped, schedule.rate(updates));
                let free = free_on(worker.device());
                let place = Place { updates, batches, per_epoch, lr, free };
                let scale = scaler.as_ref().map(GradScaler::loss_scale);
                println!("{}", serde_json::to_string(&log.line(place, train_loss, scale))?);
            }
        }
    }
    let words = (total + skipped) * dealer.per_update() * recipe.tokens_per_sample;
    Ok(Summary {
        arch: arch.name,
        world_size: dealer.world_size,
        strategy: strategy.to_string(),
        num_params: model.stats().num_params(),
        updates: total,
        skipped_updates: skipped,
        words,
        words_per_second: words as f64 / seconds.iter().sum::<f64>(),
        update_seconds_median: median(seconds),
        train_loss,
        held_out_perplexity: evaluate(job, &model, &loss_of, worker, dealer)?,
        bigram_perplexity: job.bigram,
        forecast: *forecast,
        memory: model.stats().memory(),
        host_memory: model.stats().host_memory(),
        losses,
    })
}

/// The loss of a batch, in parts of an update, and the same without its graph.
fn forward(
    model: &Gpt,
    loss_of: &CrossEntropyLoss,
    job: &Job,
    rows: &[usize],
    device: &Device,
) -> (Tensor<1>, Tensor<1>) {
    let (input, target) = job.train.batch(rows, device);
    let loss = loss_of.forward(model.forward(input), target) / job.setup.recipe.update_freq as f64;
    (loss.clone(), loss.inner())
}

/// The loss to go backward from.
fn scaled(loss: Tensor<1>, scaler: Option<&GradScaler>) -> Tensor<1> {
    match scaler {
        Some(scaler) => scaler.scale(loss),
        None => loss,
    }
}

impl Precision {
    /// The type that parameters are gathered in.
    pub const fn dtype(self) -> FloatDType {
        match self {
            Self::Full => FloatDType::F32,
            Self::Bf16 => FloatDType::BF16,
            Self::Fp16 { .. } => FloatDType::F16,
        }
    }

    /// What keeps gradients from underflowing, where they may.
    fn scaler(self) -> Result<Option<GradScaler>> {
        let Self::Fp16 { init_scale, .. } = self else { return Ok(None) };
        Ok(Some(GradScalerConfig::new().with_init_scale(init_scale).init()?))
    }

    /// Ends a run whose gradients overflow at whatever scale.
    fn check_scale(self, scaler: Option<&GradScaler>, updates: usize) -> Result<()> {
        if let (Self::Fp16 { min_scale, .. }, Some(scaler)) = (self, scaler) {
            ensure!(
                scaler.loss_scale() >= min_scale,
                "gradients overflow after {updates} updates even at a loss scale of {min_scale}, the \
                 least that --min-loss-scale allows: the loss has exploded; a lower --lr may help"
            );
        }
        Ok(())
    }
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

fn number(loss: Tensor<1>) -> Result<f64> {
    Ok(f64::from(loss.try_into_scalar::<f32>()?))
}

/// AdamW without weight decay on biases and norms.
fn optimizer(recipe: &Recipe) -> ModuleOptimizer {
    let (beta_1, beta_2) = recipe.adam_betas;
    let adam = AdamWConfig::new()
        .with_beta_1(beta_1)
        .with_beta_2(beta_2)
        .with_weight_decay(recipe.weight_decay);
    let not_decayed = ParamGroup::from_any_predicates(vec![".bias", ".gamma", ".beta"]);
    let optimizer = adam.init();
    let adam = adam.with_weight_decay(0.0).build().with_foreach(true);
    optimizer.with_group(not_decayed, adam, None)
}

/// Replaces each rank's own losses by the mean over ranks.
fn mean_over_ranks(losses: &mut [f64], worker: &Worker) -> Result<()> {
    worker.all_reduce_sum(losses)?;
    losses.iter_mut().for_each(|loss| *loss /= worker.world().size() as f64);
    Ok(())
}

/// Perplexity a word piece of the held-out text, every rank its share of the blocks.
fn evaluate(
    job: &Job,
    model: &Fsdp<Gpt>,
    loss_of: &CrossEntropyLoss,
    worker: &Worker,
    dealer: Dealer,
) -> Result<f64> {
    let device = worker.device().clone().inner();
    let model = model.valid();
    let mut sums = [0.0, 0.0];
    let batches = dealer.evaluation(&job.held_out, worker.rank().index());
    for (rows, counts) in batches.into_iter().take(job.setup.recipe.max_valid_steps) {
        let (input, target) = job.held_out.batch(&rows, &device);
        let pieces = target.dims()[0] as f64;
        let loss = number(loss_of.forward(model.forward(input), target))?;
        if counts {
            sums[0] += loss * pieces;
            sums[1] += pieces;
        }
    }
    worker.all_reduce_sum(&mut sums)?;
    Ok((sums[0] / sums[1]).exp())
}
