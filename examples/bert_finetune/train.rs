//! One rank's run: build the model, shard it, train it, evaluate it.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use burn::lr_scheduler::LrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::lr_scheduler::sequential::SequentialLrSchedulerConfig;
use burn::module::ParamGroup;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::ModuleOptimizer;
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::{GradScalerConfig, LoadOptions, Unscaled, from_pretrained};

use crate::batch::{Dealer, Padded};
use crate::cli::Recipe;
use crate::config::BertConfig;
use crate::export::Export;
use crate::metrics::{Counts, Scores, argmax, mean, median};
use crate::model::{BertForSequenceClassification, BertInput};
use crate::report::{Progress, Step, Summary};
use crate::saving::{Position, SavePlan, Saver, Training, resume};
use crate::tokenize::Encoded;

/// Everything a run needs; the same for every rank.
#[derive(Clone, Debug)]
pub struct Job {
    /// A line on the data.
    pub about: String,
    /// The model's shape.
    pub config: BertConfig,
    /// Folder of the weights to start from, if any.
    pub weights: Option<PathBuf>,
    /// Where the trained model goes, if anywhere.
    pub export: Option<Export>,
    /// Number of classes.
    pub classes: usize,
    /// The piece that fills a batch up.
    pub pad: u32,
    /// Trained on.
    pub train: Vec<Encoded>,
    /// Evaluated on.
    pub test: Vec<Encoded>,
    /// What is sharded.
    pub strategy: ShardingStrategy,
    /// How: of the configuration file, where there is one.
    pub options: FsdpOptions,
    /// How losses are scaled, if they are.
    pub scaler: Option<GradScalerConfig>,
    /// When to save and from where to resume.
    pub saving: SavePlan,
    /// How to train.
    pub recipe: Recipe,
    /// No progress.
    pub quiet: bool,
}

type Bert = Fsdp<BertForSequenceClassification>;

/// Trains and evaluates; what one rank of [`launch`] runs. Every rank gets the same summary but for
/// the times, which are its own; `None` where Ctrl-C ended the run.
///
/// # Errors
///
/// If the recipe does not fit the data, the weights or the checkpoint do not fit the model, a
/// checkpoint cannot be written, a peer fails, or the loss is no longer a number.
pub fn train(job: &Job, worker: &Worker) -> Result<Option<Summary>> {
    let Job { recipe, .. } = job;
    let rank = worker.rank().index();
    let dealer = Dealer { world_size: worker.world().size(), batch_size: recipe.batch_size };
    let per_epoch = dealer.steps_per_epoch(job.train.len())?;
    let total = recipe.total_steps(per_epoch);
    let progress = Progress::new(total, job.quiet || rank != 0);

    progress.note(&job.about);
    let mut model = load(job, worker, &progress)?;
    let mut optimizer = optimizer(recipe);
    let mut schedule = schedule(recipe, total)?;
    let loss_of = CrossEntropyLossConfig::new().init(worker.device());
    let mut scaler = job.scaler.as_ref().map(GradScalerConfig::init).transpose()?;
    let mut saver = Saver::new(&job.saving, worker);
    macro_rules! training {
        () => {
            Training {
                model: &mut model,
                optimizer: &mut optimizer,
                schedule: &mut schedule,
                scaler: scaler.as_mut(),
            }
        };
    }
    let mut at = match &job.saving.resume {
        Some(folder) => {
            let at = resume(worker, folder, training!())?;
            progress.note(&format!("resumed after step {}", at.step));
            at
        }
        None => Position::default(),
    };
    let end = recipe.stop_after.map_or(total, |step| step.min(total));

    let lengths: Vec<usize> = job.train.iter().map(|example| example.ids.len()).collect();
    let mut losses = Vec::new();
    let mut seconds = Vec::new();
    let mut tokens = 0;
    let mut scores = None;
    let mut epoch_loss = 0.0;

    while at.step < end {
        let begin = Instant::now();
        let first = losses.len();
        let taken = at.examples / dealer.global_batch();
        let batches = dealer.epoch(&lengths, recipe.seed, at.epoch);
        for batch in batches.iter().skip(taken).take(end - at.step) {
            let begin = Instant::now();
            let rows = dealer.share(batch, rank);
            let input = BertInput::new(Padded::new(&job.train, rows, job.pad), worker.device());
            let logits = model.forward(input.ids, input.types, input.padding);
            let loss = loss_of.forward(logits, input.labels);

            let value = loss.clone().inner();
            let grads = match &mut scaler {
                Some(scaler) => {
                    let grads = model.backward(scaler.scale(loss))?;
                    scaler.unscale(&model, grads)?
                }
                None => Unscaled::Finite(model.backward(loss)?),
            };
            let rate = schedule.step();
            // An overflow leaves the step without an update.
            if let Unscaled::Finite(mut grads) = grads {
                model.clip_grad_norm(&mut grads, recipe.max_norm)?;
                model = optimizer.step(rate.clone(), model, grads);
            }

            let value = f64::from(value.try_into_scalar::<f32>()?);
            at = Position { step: at.step + 1, examples: at.examples + batch.len(), ..at };
            ensure!(
                value.is_finite(),
                "the loss of step {} is {value}; a lower --learning-rate may help",
                at.step
            );
            losses.push(value);
            seconds.push(begin.elapsed().as_secs_f64());
            tokens += batch.iter().map(|row| lengths[*row]).sum::<usize>();
            progress.step(Step {
                number: at.step,
                loss: value,
                learning_rate: rate.base(),
                tokens_per_second: tokens as f64 / seconds.iter().sum::<f64>(),
            });
            if saver.after_step(worker, at, &training!())? {
                saver.finish(at, &training!())?;
                progress.note(&format!("saved after step {}", at.step));
                return Ok(None);
            }
        }
        mean_over_ranks(&mut losses[first..], worker)?;
        epoch_loss = mean(&losses[first..]);
        let found = evaluate(job, &model, worker, dealer)?;
        progress.epoch(at.epoch + 1, epoch_loss, found, begin.elapsed());
        scores = Some(found);
        if at.examples / dealer.global_batch() >= per_epoch {
            at = Position { epoch: at.epoch + 1, examples: 0, ..at };
        }
    }
    saver.finish(at, &training!())?;
    let scores = match scores {
        Some(scores) => scores,
        // Resumed where the run had ended.
        None => evaluate(job, &model, worker, dealer)?,
    };
    progress.finish();
    if let Some(export) = &job.export {
        model.state().save_pretrained(&export.folder, &export.options())?;
    }

    let [sharded, peak] =
        most([model.stats().sharded_bytes(), model.stats().peak_unsharded_bytes()], worker)?;
    Ok(Some(Summary {
        world_size: dealer.world_size,
        strategy: job.strategy.to_string(),
        num_params: model.stats().num_params(),
        sharded_bytes_per_rank: sharded,
        peak_unsharded_bytes: peak,
        steps: losses.len(),
        tokens_per_second: tokens as f64 / seconds.iter().sum::<f64>().max(f64::MIN_POSITIVE),
        train_loss: epoch_loss,
        accuracy: scores.accuracy,
        f1: scores.f1,
        step_seconds_median: median(&seconds),
        losses,
    }))
}

/// Builds the model, sharded; what there are weights for, or a checkpoint, is loaded and never drawn.
fn load(job: &Job, worker: &Worker, progress: &Progress) -> Result<Bert> {
    let model = job.config.init(job.classes, worker.device());
    let resumes = job.saving.resume.is_some();
    let options = job.options.clone().with_strategy(job.strategy).with_seed(job.recipe.seed);
    let Some(path) = job.weights.as_ref().filter(|_| !resumes) else {
        return Ok(fully_shard(model, worker, options.with_deferred_init(resumes))?);
    };
    // A file of the bare encoder has no classifier and no `bert.` before its names; one that was
    // pretrained has heads of its own, and old ones hold the positions' numbers.
    let load = LoadOptions::new()
        .with_base_prefix("bert")
        .with_legacy_layer_norm()
        .with_allowed_missing("classifier.")
        .with_allowed_missing("bert.pooler.")
        .with_allowed_unexpected("cls.")
        .with_allowed_unexpected("embeddings.position_ids")
        .with_allowed_unexpected("bert.embeddings.position_ids");
    let (model, report) = from_pretrained(model, worker, options, path, &load)
        .with_context(|| format!("cannot start from {}", path.display()))?;
    for (what, names) in [("newly drawn", &report.missing), ("not used", &report.unexpected)] {
        if !names.is_empty() {
            progress.note(&format!("{}: {what}: {}", path.display(), names.join(", ")));
        }
    }
    Ok(model)
}

/// AdamW without weight decay on biases and norms.
fn optimizer(recipe: &Recipe) -> ModuleOptimizer {
    let adam = AdamWConfig::new().with_weight_decay(recipe.weight_decay);
    let not_decayed = ParamGroup::from_any_predicates(vec![".bias", ".gamma", ".beta"]);
    let optimizer = adam.init();
    let adam = adam.with_weight_decay(0.0).build().with_foreach(true);
    optimizer.with_group(not_decayed, adam, None)
}

/// A learning rate that rises in a straight line to its peak, and falls in one towards 0.
fn schedule(recipe: &Recipe, total: usize) -> Result<ModuleLrScheduler> {
    let peak = recipe.learning_rate;
    let warmup = ((total as f64 * recipe.warmup).ceil() as usize).max(1);
    let rise = match warmup {
        1 => LrSchedulerConfig::Constant(peak),
        _ => LinearLrSchedulerConfig::new(peak / warmup as f64, peak, warmup - 1).into(),
    };
    let fall = LinearLrSchedulerConfig::new(peak, 0.0, total.saturating_sub(warmup).max(1));
    SequentialLrSchedulerConfig::new(vec![rise, fall.into()], vec![warmup])
        .init()
        .map_err(|error| anyhow!("learning rate schedule: {error}"))
}

/// Replaces each rank's own losses by the mean over ranks: one collective for a whole epoch.
fn mean_over_ranks(losses: &mut [f64], worker: &Worker) -> Result<()> {
    worker.all_reduce_sum(losses)?;
    losses.iter_mut().for_each(|loss| *loss /= worker.world().size() as f64);
    Ok(())
}

/// The largest of each number over ranks.
fn most<const N: usize>(own: [usize; N], worker: &Worker) -> Result<[usize; N]> {
    let (world, rank) = (worker.world().size(), worker.rank().index());
    let mut all = vec![0.0; N * world];
    for (index, own) in own.into_iter().enumerate() {
        all[index * world + rank] = own as f64;
    }
    worker.all_reduce_sum(&mut all)?;
    let of_ranks = |index: usize| all[index * world..(index + 1) * world].iter();
    Ok(std::array::from_fn(|index| of_ranks(index).fold(0.0, |a, &b| f64::max(a, b)) as usize))
}

/// Scores the held-out split, every rank its share of it.
fn evaluate(job: &Job, model: &Bert, worker: &Worker, dealer: Dealer) -> Result<Scores> {
    let device = worker.device().clone().inner();
    let model = model.valid();
    let lengths: Vec<usize> = job.test.iter().map(|example| example.ids.len()).collect();
    let mut counts = Counts::new(job.classes);
    for share in dealer.evaluation(&lengths, worker.rank().index()) {
        let input = BertInput::new(Padded::new(&job.test, &share.rows, job.pad), &device);
        let logits = model.forward(input.ids, input.types, input.padding);
        let logits = logits.try_into_data()?.try_into_vec_as::<f32>()?;
        let guesses = logits.chunks_exact(job.classes).map(argmax);
        for (guess, row) in guesses.zip(&share.rows).take(share.counted) {
            counts.add(guess, job.test[*row].label);
        }
    }
    worker.all_reduce_sum(counts.as_mut_slice())?;
    Ok(counts.scores())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::Cli;

    fn rates(total: usize) -> Vec<f64> {
        let recipe = Cli::parse_from(["bert_finetune", "--learning-rate", "1e-3"]).recipe();
        let mut schedule = schedule(&recipe, total).unwrap();
        (0..total).map(|_| schedule.step().base()).collect()
    }

    #[test]
    fn the_rate_rises_for_a_tenth_and_falls_for_the_rest() {
        let rates = rates(100);
        let close = |rate: f64, expected: f64| (rate - expected).abs() < 1e-12;
        assert!(close(rates[0], 1e-4) && close(rates[9], 1e-3) && close(rates[10], 1e-3));
        assert!(rates[..10].is_sorted() && rates[10..].is_sorted_by(|a, b| a > b));
        assert!(close(rates[99], 1e-3 / 90.0));
    }

    #[test]
    fn a_run_of_any_length_has_a_rate_for_every_step() {
        for total in [1, 2, 3, 10, 11, 20, 21] {
            assert!(rates(total).iter().all(|rate| *rate > 0.0 && *rate <= 1e-3), "{total}");
        }
    }
}
