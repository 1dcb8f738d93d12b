//! Training loop of one rank.

use std::time::Instant;

use anyhow::{Result, ensure};
use burn::tensor::Tensor;
use fsdp_runtime::memory::MemoryForecast;
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;

use crate::available_memory::free_memory;
use crate::batch::Dealer;
use crate::checkpoints::{Position, Saver, TrainingState, resume};
use crate::common::report::grouped;
use crate::common::training::{adamw, median, read_loss, scale_loss, unscale_gradients};
use crate::fairseq_log::{Evaluation, LogPosition, UpdateStats};
use crate::generate::{GenerateArgs, Generated, generate};
use crate::job::{Job, Setup};
use crate::learning_rate::LrSchedule;
use crate::recipe::Recipe;
use crate::run_log::RunLog;
use crate::summary::Summary;

/// Trains and evaluates the model on one rank. Every rank calls it within [`launch`]. Returns the
/// summary, in which only durations and memory differ between ranks, or `None` if Ctrl-C ended the
/// run.
///
/// # Errors
///
/// If the hyperparameters do not fit the text, a checkpoint does not fit the model or cannot be
/// written, a peer fails, the loss is not finite, or gradients overflow in float16 at every loss
/// scale.
pub fn train(job: &Job, forecast: &MemoryForecast, worker: &Worker) -> Result<Option<Summary>> {
    let begin = Instant::now();
    let trainer = Trainer::new(job, worker)?;
    trainer.state.model.set_memory_limit(job.memory_limit);
    let memory = job.memory.record(&trainer.state.model, worker, Some(*forecast))?;
    let outcome = trainer.run(forecast, begin);
    memory.finish(&outcome)?;
    outcome
}

/// One rank's part of a run.
struct Trainer<'a> {
    job: &'a Job,
    worker: &'a Worker,
    total_updates: usize,
    schedule: LrSchedule,

    state: TrainingState,
    position: Position,
    /// Current epoch, and its blocks in the order in which they are trained on.
    order: Option<(usize, Vec<usize>)>,
    saver: Option<Saver>,

    log: RunLog,
    evaluation: Option<Evaluation>,
}

impl<'a> Trainer<'a> {
    /// Shards the model, builds the optimizer, and loads the checkpoint to resume from, if any.
    fn new(job: &'a Job, worker: &'a Worker) -> Result<Self> {
        let recipe = &job.setup.recipe;
        let dealer = |epoch| dealer(&job.setup, worker, epoch);
        for epoch in 0..recipe.update_freq.len() {
            dealer(epoch).updates_per_epoch(job.train.len())?;
        }
        let total_updates = recipe.updates(|epoch| job.train.len() / dealer(epoch).per_update());
        let log = RunLog::new(job, worker);
        let from = job.checkpoints.find(worker)?;
        let mut state = TrainingState {
            model: job.shard(worker, from.is_some())?,
            optimizer: adamw(optimizer(recipe)),
            scaler: job.setup.sharding.precision.scaler()?,
        };
        describe(job, worker, &state, &log);
        let mut saver = job.checkpoints.saver(worker);
        let mut position = Position::default();
        if let Some(folder) = &from {
            position = resume(worker, folder, &mut state)?;
            if let Some(saver) = &mut saver {
                saver.resumed(position);
            }
            let (folder, Position { updates, epoch, .. }) = (folder.display(), position);
            let text =
                format!("Loaded checkpoint {folder} (epoch {} @ {updates} updates)", epoch + 1);
            log.note("fairseq.trainer", &text);
        }
        let schedule = recipe.schedule(total_updates);
        let (order, evaluation) = (None, None);
        Ok(Self {
            job,
            worker,
            total_updates,
            schedule,
            state,
            position,
            order,
            saver,
            log,
            evaluation,
        })
    }

    /// Trains for the updates that are left. Returns `None` if Ctrl-C ended the run.
    fn run(self, forecast: &MemoryForecast, begin: Instant) -> Result<Option<Summary>> {
        let mut trainer = self;
        let trains = !trainer.job.generate.generate_only;
        while trains && trainer.position.updates < trainer.total_updates {
            trainer = trainer.update()?;
            if trainer.after_update()? {
                return Ok(None);
            }
        }
        trainer.finish(forecast, begin).map(Some)
    }

    fn recipe(&self) -> &'a Recipe {
        &self.job.setup.recipe
    }

    /// Returns the dealer of the current epoch.
    fn dealer(&self) -> Dealer {
        dealer(&self.job.setup, self.worker, self.position.epoch)
    }

    /// Returns this rank's number among those that take different samples.
    fn batch_rank(&self) -> usize {
        self.state.model.stats().mesh().batch_rank().index()
    }

    /// Trains on the batches of one update: forward and backward of each, clipping and update.
    ///
    /// The trainer is passed by value because Burn's optimizers take the model by value.
    fn update(mut self) -> Result<Self> {
        let (recipe, dealer) = (self.recipe(), self.dealer());
        let epoch = self.position.epoch;
        if self.order.as_ref().is_none_or(|(of, _)| *of != epoch) {
            self.order = Some((epoch, dealer.epoch(self.job.train.len(), recipe.seed, epoch)));
        }

        let begin = Instant::now();
        let mut loss = 0.0;
        for batch in 0..dealer.update_freq - 1 {
            let (scaled, value) = self.forward(dealer, batch)?;
            self.state.model.accumulate(scaled)?;
            loss += read_loss(value)?;
        }
        let (scaled, value) = self.forward(dealer, dealer.update_freq - 1)?;
        let TrainingState { model, scaler, .. } = &mut self.state;
        let gradients = model.backward(scaled)?;
        let gradients = unscale_gradients(model, gradients, scaler.as_mut())?;
        self.position.samples += dealer.per_update();
        let Unscaled::Finite(mut gradients) = gradients else {
            self.skip(dealer, begin)?;
            return Ok(self);
        };
        let norm = model.clip_grad_norm(&mut gradients, recipe.max_norm())?;
        let rate = self.schedule.rate(self.position.updates);
        self.state.model = self.state.optimizer.step(rate, self.state.model, gradients);
        loss += read_loss(value)?;

        self.position.updates += 1;
        let updates = self.position.updates;
        ensure!(loss.is_finite(), "the loss of update {updates} is {loss}; a lower --lr may help");
        let (seconds, samples) = (begin.elapsed().as_secs_f64(), dealer.per_update());
        self.log.update(loss, UpdateStats { norm, seconds, samples });
        if self.log.count() == 1 {
            // The first update allocated the optimizer's state.
            self.state.model.stats().record_optimizer(&self.state.optimizer)?;
        }
        Ok(self)
    }

    /// Computes the loss of a batch of the current update, divided by the number of batches in an
    /// update. Returns it multiplied by the loss scale, to run backward from, and as it is, without
    /// autodiff.
    fn forward(&self, dealer: Dealer, batch: usize) -> Result<(Tensor<1>, Tensor<1>)> {
        let order = self.order.as_ref().map_or(&[][..], |(_, order)| order);
        let at = self.position.samples / dealer.per_update();
        let rows = dealer.share(order, at, batch, self.batch_rank());
        let mesh = self.state.model.stats().mesh();
        let (input, target) = self.job.train.part(rows, mesh, self.worker.device())?;
        let loss = self.state.model.forward_loss(input, target);
        let loss = loss / dealer.update_freq as f64;
        Ok((scale_loss(loss.clone(), self.state.scaler.as_ref()), loss.inner()))
    }

    /// Records an overflow.
    fn skip(&mut self, dealer: Dealer, begin: Instant) -> Result<()> {
        self.position.skipped += 1;
        let precision = self.job.setup.sharding.precision;
        let scaler = self.state.scaler.as_ref();
        precision.check_scale(scaler, self.position.updates)?;
        let scale = scaler.map_or(1.0, GradScaler::loss_scale);
        let text = format!(
            "NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: {scale:?}"
        );
        self.log.note("fairseq.trainer", &text);
        self.log.overflow(begin.elapsed().as_secs_f64(), dealer.per_update());
        Ok(())
    }

    /// Writes the log lines that are due, evaluates at the end of an epoch and of the run, and saves
    /// a checkpoint if one is due. Returns whether Ctrl-C ends the run.
    fn after_update(&mut self) -> Result<bool> {
        let Position { updates, epoch, samples, .. } = self.position;
        let (recipe, dealer) = (self.recipe(), self.dealer());
        let stops = updates == self.total_updates;
        let at = (samples / dealer.per_update()) as f64;
        let per_epoch = dealer.updates_per_epoch(self.job.train.len())? as f64;
        let position = self.log_position(at / per_epoch);
        if self.log.pending() > 0 && (updates.is_multiple_of(recipe.log_interval) || stops) {
            self.log.updates(position, self.worker)?;
        }
        if stops && recipe.max_update == Some(updates) {
            let text =
                format!("Stopping training due to num_updates: {updates} >= max_update: {updates}");
            self.log.note("fairseq_cli.train", &text);
        }
        let epoch_ends = at >= per_epoch;
        if epoch_ends || stops {
            if stops || (epoch + 1).is_multiple_of(recipe.validate_interval) {
                self.evaluate(&position)?;
            }
            self.log.epoch(position, self.worker)?;
        }
        if epoch_ends {
            self.position = Position { epoch: epoch + 1, samples: 0, ..self.position };
        }
        match &mut self.saver {
            Some(saver) => saver.after_update(self.worker, self.position, epoch_ends, &self.state),
            None => Ok(false),
        }
    }

    /// Returns the state of the run for a log line, `done` of the current epoch.
    fn log_position(&self, done: f64) -> LogPosition {
        LogPosition {
            updates: self.position.updates,
            epoch: self.position.epoch,
            done,
            lr: self.schedule.rate(self.position.updates),
            loss_scale: self.state.scaler.as_ref().map(GradScaler::loss_scale),
            free: free_memory(self.worker.device()),
        }
    }

    /// Saves the last checkpoint and returns the summary.
    fn finish(mut self, forecast: &MemoryForecast, begin: Instant) -> Result<Summary> {
        let GenerateArgs { generate_only, generate: texts, .. } = &self.job.generate;
        if !generate_only {
            if let Some(saver) = &mut self.saver {
                saver.finish(self.worker, self.position, &self.state)?;
            }
            if self.evaluation.is_none() {
                // The run resumed from a checkpoint of its own end, and took no update.
                self.evaluate(&self.log_position(0.0))?;
            }
            if let Some(export) = &self.job.export {
                export.save(&self.state.model, self.worker)?;
            }
        }
        let generated = match texts.is_empty() {
            true => Vec::new(),
            false => self.generate()?,
        };
        if !generate_only {
            let text = format!("done training in {:.1} seconds", begin.elapsed().as_secs_f64());
            self.log.note("fairseq_cli.train", &text);
        }
        let Setup { arch, sharding, recipe, .. } = &self.job.setup;
        let words = self.log.samples() * recipe.tokens_per_sample;
        let seconds = self.log.seconds().iter().sum::<f64>().max(f64::MIN_POSITIVE);
        let stats = self.state.model.stats();
        Ok(Summary {
            arch: arch.name,
            world_size: self.worker.world().size(),
            strategy: sharding.strategy.to_string(),
            num_params: stats.num_params(),
            updates: self.position.updates,
            skipped_updates: self.position.skipped,
            words,
            words_per_second: words as f64 / seconds,
            update_seconds_median: median(self.log.seconds()),
            train_loss: self.log.train_loss(),
            held_out_perplexity: self.evaluation.map(|evaluation| evaluation.loss.exp()),
            bigram_perplexity: self.job.bigram_perplexity,
            forecast: *forecast,
            memory: stats.memory(),
            host_memory: stats.host_memory(),
            generated,
            losses: self.log.into_losses(),
        })
    }

    /// Continues this rank's texts of `--generate`.
    fn generate(&self) -> Result<Vec<Generated>> {
        let Job { setup, bpe, generate: args, .. } = self.job;
        let limits = (setup.positions, setup.recipe.seed);
        generate(&self.state.model, self.worker, bpe.as_ref(), args, limits)
    }

    /// Evaluates the model on the held-out text, of which each rank takes a part.
    fn evaluate(&mut self, position: &LogPosition) -> Result<()> {
        self.log.note("fairseq_cli.train", "begin validation on \"valid\" subset");
        let begin = Instant::now();
        let device = self.worker.device().clone().inner();
        let model = self.state.model.valid();
        let mut sums = [0.0; 3];
        let mesh = model.stats().mesh();
        let blocks = self.job.setup.sharding.blocks();
        let batches = self.dealer().evaluation(&self.job.held_out, self.batch_rank(), blocks);
        let steps = batches.len().min(self.recipe().max_valid_steps);
        for (rows, counts) in batches.into_iter().take(steps) {
            let (input, target) = self.job.held_out.part(&rows, mesh, &device)?;
            let pieces = target.dims()[0] as f64;
            let loss = read_loss(model.forward_loss(input, target))?;
            if counts {
                sums[0] += loss * pieces;
                sums[1] += pieces;
                sums[2] += rows.len() as f64;
            }
        }
        self.worker.all_reduce_sum(&mut sums)?;
        // Tensor parallel ranks have the same samples, and context parallel ranks parts of them.
        let tensor = mesh.tensor_size().size() as f64;
        let [loss, words, samples] = sums.map(|sum| sum / tensor);
        let samples = samples / mesh.context_size().size() as f64;
        let (steps, seconds) = (steps as f64, begin.elapsed().as_secs_f64());
        let evaluation = Evaluation { loss: loss / words, words, samples, steps, seconds };
        self.log.evaluation(&evaluation, position)?;
        self.evaluation = Some(evaluation);
        Ok(())
    }
}

/// Writes fairseq's lines about the model and the ranks.
fn describe(job: &Job, worker: &Worker, state: &TrainingState, log: &RunLog) {
    let params = grouped(state.model.stats().num_params());
    let trained = match job.setup.lora {
        // The adapters alone, whose number is not known here.
        Some(_) => String::new(),
        None => format!(" (num. trained: {params})"),
    };
    let devices = worker.world().size();
    let batch = job.setup.recipe.batch_size;
    for line in [
        format!("num. model params: {params}{trained}"),
        format!("training on {devices} devices (GPUs/TPUs)"),
        format!("max tokens per GPU = None and batch size per GPU = {batch}"),
    ] {
        log.note("fairseq_cli.train", &line);
    }
}

/// Returns the assignment of blocks to ranks in an epoch, counted from 0.
fn dealer(setup: &Setup, worker: &Worker, epoch: usize) -> Dealer {
    let Setup { recipe, sharding, .. } = setup;
    Dealer {
        world_size: sharding.batch_ranks(worker.world().size()),
        batch_size: recipe.batch_size,
        update_freq: recipe.update_freq(epoch),
    }
}

fn optimizer(recipe: &Recipe) -> AdamWConfig {
    let (beta_1, beta_2) = recipe.adam_betas;
    AdamWConfig::new()
        .with_beta_1(beta_1)
        .with_beta_2(beta_2)
        .with_epsilon(recipe.adam_eps)
        .with_weight_decay(recipe.weight_decay)
}
