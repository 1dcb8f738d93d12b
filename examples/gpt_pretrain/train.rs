//! Training loop of one rank.

use std::time::Instant;

use anyhow::{Result, ensure};
use burn::optim::ModuleOptimizer;
use burn::tensor::Tensor;
use fsdp_runtime::MemoryForecast;
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;

use crate::available_memory::free_memory;
use crate::batch::Dealer;
use crate::common::training::{
    adamw, mean_over_ranks, median, read_loss, scale_loss, unscale_gradients,
};
use crate::fairseq_log::{LogPosition, LogWindow, UpdateStats};
use crate::job::{Job, Setup};
use crate::learning_rate::LrSchedule;
use crate::model::Gpt;
use crate::summary::Summary;

/// Trains and evaluates the model on one rank. Every rank calls it within [`launch`]. Returns the
/// summary, in which only durations and memory differ between ranks.
///
/// # Errors
///
/// If the hyperparameters do not fit the text, a peer fails, the loss is not finite, or gradients
/// overflow in float16 at every loss scale.
pub fn train(job: &Job, forecast: &MemoryForecast, worker: &Worker) -> Result<Summary> {
    let mut trainer = Trainer::new(job, worker)?;
    while trainer.losses.len() < trainer.total_updates {
        trainer = trainer.update()?;
    }
    trainer.finish(forecast)
}

/// One rank's part of a run.
struct Trainer<'a> {
    job: &'a Job,
    worker: &'a Worker,
    dealer: Dealer,
    updates_per_epoch: usize,
    total_updates: usize,
    /// Blocks of the current epoch, in the order in which they are trained on.
    order: Vec<usize>,

    model: Fsdp<Gpt>,
    optimizer: ModuleOptimizer,
    schedule: LrSchedule,
    scaler: Option<GradScaler>,

    log: LogWindow,
    /// Loss of every update, in base 2: the mean over ranks up to the last log line, this rank's
    /// own after it.
    losses: Vec<f64>,
    /// Number of updates at the last log line.
    logged: usize,
    /// Mean loss of the updates of the last log line, in base 2.
    train_loss: f64,
    /// Number of overflows. Each is in place of an update, on every rank.
    skipped: usize,
    /// Duration of every update and of every overflow.
    seconds: Vec<f64>,
}

impl<'a> Trainer<'a> {
    /// Shards the model and builds the optimizer.
    fn new(job: &'a Job, worker: &'a Worker) -> Result<Self> {
        let Setup { recipe, sharding, .. } = &job.setup;
        let dealer = Dealer {
            world_size: worker.world().size(),
            batch_size: recipe.batch_size,
            update_freq: recipe.update_freq,
        };
        let updates_per_epoch = dealer.updates_per_epoch(job.train.len())?;
        let total_updates = recipe.updates(updates_per_epoch);
        let (beta_1, beta_2) = recipe.adam_betas;
        let adam = AdamWConfig::new()
            .with_beta_1(beta_1)
            .with_beta_2(beta_2)
            .with_weight_decay(recipe.weight_decay);
        Ok(Self {
            job,
            worker,
            dealer,
            updates_per_epoch,
            total_updates,
            order: Vec::new(),
            model: fully_shard(job.setup.model(worker.device()), worker, job.setup.options())?,
            optimizer: adamw(adam),
            schedule: recipe.schedule(total_updates),
            scaler: sharding.precision.scaler()?,
            log: LogWindow::new(dealer.per_update(), recipe.tokens_per_sample, recipe.clip_norm),
            losses: Vec::with_capacity(total_updates),
            logged: 0,
            train_loss: 0.0,
            skipped: 0,
            seconds: Vec::with_capacity(total_updates),
        })
    }

    /// Trains on the batches of one update: forward and backward of each, clipping and update.
    ///
    /// The trainer is passed by value because Burn's optimizers take the model by value.
    fn update(mut self) -> Result<Self> {
        let recipe = &self.job.setup.recipe;
        let at = self.batches_taken() % self.updates_per_epoch;
        if at == 0 {
            let epoch = self.batches_taken() / self.updates_per_epoch;
            self.order = self.dealer.epoch(self.job.train.len(), recipe.seed, epoch);
        }

        let begin = Instant::now();
        let mut loss = 0.0;
        for batch in 0..recipe.update_freq - 1 {
            let (scaled, value) = self.forward(at, batch);
            self.model.accumulate(scaled)?;
            loss += read_loss(value)?;
        }
        let (scaled, value) = self.forward(at, recipe.update_freq - 1);
        let gradients = self.model.backward(scaled)?;
        let gradients = unscale_gradients(&self.model, gradients, self.scaler.as_mut())?;
        let Unscaled::Finite(mut gradients) = gradients else {
            self.skip(begin)?;
            return Ok(self);
        };
        let norm = self.model.clip_grad_norm(&mut gradients, recipe.max_norm())?;
        let rate = self.schedule.rate(self.losses.len());
        self.model = self.optimizer.step(rate, self.model, gradients);
        loss += read_loss(value)?;

        self.record(loss, norm, begin)?;
        Ok(self)
    }

    /// Computes the loss of batch `batch` of the epoch's update `at`, divided by the number of
    /// batches in an update. Returns it multiplied by the loss scale, to run backward from, and as
    /// it is, without autodiff.
    fn forward(&self, at: usize, batch: usize) -> (Tensor<1>, Tensor<1>) {
        let rows = self.dealer.share(&self.order, at, batch, self.worker.rank().index());
        let (input, target) = self.job.train.batch(rows, self.worker.device());
        let loss = self.model.forward_loss(input, target);
        let loss = loss / self.dealer.update_freq as f64;
        (scale_loss(loss.clone(), self.scaler.as_ref()), loss.inner())
    }

    /// Returns the number of updates and overflows: each takes the batches of one update from the
    /// text.
    fn batches_taken(&self) -> usize {
        self.losses.len() + self.skipped
    }

    /// Records an overflow.
    fn skip(&mut self, begin: Instant) -> Result<()> {
        self.skipped += 1;
        let precision = self.job.setup.sharding.precision;
        precision.check_scale(self.scaler.as_ref(), self.losses.len())?;
        let seconds = begin.elapsed().as_secs_f64();
        self.seconds.push(seconds);
        self.log.overflow(seconds);
        Ok(())
    }

    /// Records an update, and prints a log line if one is due. `loss` is in base e.
    fn record(&mut self, loss: f64, norm: f64, begin: Instant) -> Result<()> {
        ensure!(
            loss.is_finite(),
            "the loss of update {} is {loss}; a lower --lr may help",
            self.losses.len() + 1
        );
        self.losses.push(loss / std::f64::consts::LN_2);
        let seconds = begin.elapsed().as_secs_f64();
        self.seconds.push(seconds);
        self.log.update(UpdateStats { norm, seconds });
        let updates = self.losses.len();
        if updates == 1 {
            // The first update allocated the optimizer's state.
            self.model.stats().record_optimizer(&self.optimizer)?;
        }
        let interval = self.job.setup.recipe.log_interval;
        if updates.is_multiple_of(interval) || updates == self.total_updates {
            self.log_line()?;
        }
        Ok(())
    }

    /// Averages the losses since the last log line over ranks. Rank 0 prints a log line, and appends
    /// it to the log file.
    fn log_line(&mut self) -> Result<()> {
        let updates = self.losses.len();
        let losses = &mut self.losses[self.logged..];
        mean_over_ranks(losses, self.worker)?;
        self.train_loss = losses.iter().sum::<f64>() / losses.len() as f64;
        self.logged = updates;
        if self.worker.rank().index() == 0 {
            let position = LogPosition {
                updates,
                batches: self.batches_taken(),
                per_epoch: self.updates_per_epoch,
                lr: self.schedule.rate(updates),
                free: free_memory(self.worker.device()),
            };
            let scale = self.scaler.as_ref().map(GradScaler::loss_scale);
            let line = self.log.line(position, self.train_loss, scale);
            let line = serde_json::to_string(&line)?;
            if self.job.log {
                println!("{line}");
            }
            self.job.log_file.line(&line);
        }
        Ok(())
    }

    /// Evaluates the model and returns the summary.
    fn finish(self, forecast: &MemoryForecast) -> Result<Summary> {
        let Setup { arch, sharding, recipe } = &self.job.setup;
        let words = self.batches_taken() * self.dealer.per_update() * recipe.tokens_per_sample;
        Ok(Summary {
            arch: arch.name,
            world_size: self.dealer.world_size,
            strategy: sharding.strategy.to_string(),
            num_params: self.model.stats().num_params(),
            updates: self.total_updates,
            skipped_updates: self.skipped,
            words,
            words_per_second: words as f64 / self.seconds.iter().sum::<f64>(),
            update_seconds_median: median(&self.seconds),
            train_loss: self.train_loss,
            held_out_perplexity: self.evaluate()?,
            bigram_perplexity: self.job.bigram_perplexity,
            forecast: *forecast,
            memory: self.model.stats().memory(),
            host_memory: self.model.stats().host_memory(),
            losses: self.losses,
        })
    }

    /// Returns the perplexity per word piece of the held-out text. Each rank takes a part of it.
    fn evaluate(&self) -> Result<f64> {
        let device = self.worker.device().clone().inner();
        let model = self.model.valid();
        let mut sums = [0.0, 0.0];
        let batches = self.dealer.evaluation(&self.job.held_out, self.worker.rank().index());
        for (rows, counts) in batches.into_iter().take(self.job.setup.recipe.max_valid_steps) {
            let (input, target) = self.job.held_out.batch(&rows, &device);
            let pieces = target.dims()[0] as f64;
            let loss = read_loss(model.forward_loss(input, target))?;
            if counts {
                sums[0] += loss * pieces;
                sums[1] += pieces;
            }
        }
        self.worker.all_reduce_sum(&mut sums)?;
        Ok((sums[0] / sums[1]).exp())
    }
}
