//! Training loop of one rank.

use std::time::Instant;

use anyhow::{Result, ensure};
use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use fsdp_runtime::memory::MemoryForecast;
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::optim::GradScalerConfig;
use fsdp_runtime::prelude::*;

use crate::batch::{Dealer, Padded};
use crate::common::progress::{Progress, Step};
use crate::common::saver::{Position, Saver, TrainingState, resume};
use crate::common::training::{
    adamw, mean_over_ranks, median, read_loss, scale_loss, unscale_gradients,
};
use crate::job::Job;
use crate::learning_rate::schedule;
use crate::lora;
use crate::metrics::{Counts, Scores, argmax, mean};
use crate::model::{BertForSequenceClassification, BertInput};
use crate::sharding::shard_model;
use crate::summary::Summary;

/// Trains and evaluates the model on one rank. Every rank calls it within [`launch`]. Returns the
/// summary, in which only the durations differ between ranks, or `None` if Ctrl-C ended the run.
///
/// # Errors
///
/// If the hyperparameters do not fit the data, the weights or the checkpoint do not fit the model,
/// a checkpoint cannot be written, a peer fails, or the loss is not finite.
pub fn train(job: &Job, worker: &Worker) -> Result<Option<Summary>> {
    let trainer = Trainer::new(job, worker)?;
    let memory = job.memory.record(&trainer.state.model, worker, trainer.forecast)?;
    let outcome = trainer.run();
    memory.finish(&outcome)?;
    outcome
}

/// One rank's part of a run.
struct Trainer<'a> {
    job: &'a Job,
    worker: &'a Worker,
    dealer: Dealer,
    /// Length of each training example, in word pieces.
    lengths: Vec<usize>,
    steps_per_epoch: usize,
    /// Step after which the run ends.
    last_step: usize,

    /// Memory that the rank will need, if memory is recorded.
    forecast: Option<MemoryForecast>,
    state: TrainingState<BertForSequenceClassification>,
    loss_fn: CrossEntropyLoss,
    position: Position,
    saver: Saver,
    /// Whether Ctrl-C ended the run.
    interrupted: bool,

    progress: Progress,
    /// Loss of every step: the mean over ranks for complete epochs, this rank's own for the current
    /// one.
    losses: Vec<f64>,
    /// Duration of every step.
    seconds: Vec<f64>,
    /// Word pieces trained on, over all ranks, without padding.
    tokens: usize,
    /// Bytes that this rank sent in the all-gathers of all steps.
    sent_bytes: usize,
    /// Mean loss of the last complete epoch, 0 before that, and the scores after it.
    epoch_loss: f64,
    scores: Option<Scores>,
}

impl<'a> Trainer<'a> {
    /// Shards the model, builds the optimizer, and loads the checkpoint to resume from, if any.
    fn new(job: &'a Job, worker: &'a Worker) -> Result<Self> {
        let recipe = &job.recipe;
        let dealer = Dealer { world_size: worker.world().size(), batch_size: recipe.batch_size };
        let steps_per_epoch = dealer.steps_per_epoch(job.dataset.train.len())?;
        let total_steps = recipe.total_steps(steps_per_epoch);
        let progress = match worker.rank().index() {
            0 => {
                let (file, board) = (job.log_file.clone(), job.board.clone());
                Progress::new(total_steps, job.quiet, file, board)
            }
            _ => Progress::silent(),
        };
        progress.note(&job.dataset.description);

        let from = job.checkpoints.find(worker)?;
        let (model, forecast) = shard_model(job, worker, &progress, from.is_some())?;
        let mut state = TrainingState {
            name: "bert",
            model,
            optimizer: adamw(AdamWConfig::new().with_weight_decay(recipe.weight_decay)),
            schedule: schedule(recipe, total_steps)?,
            scaler: job.scaler.as_ref().map(GradScalerConfig::init).transpose()?,
            values: Default::default(),
        };
        let saver = Saver::new(&job.checkpoints, worker);
        let mut position = Position::default();
        if let Some(folder) = &from {
            position = resume(worker, folder, &mut state)?;
            progress.note(&format!("resumed after step {}", position.step));
        }
        Ok(Self {
            job,
            worker,
            dealer,
            lengths: job.dataset.train.iter().map(|example| example.ids.len()).collect(),
            steps_per_epoch,
            last_step: recipe.stop_after.map_or(total_steps, |step| step.min(total_steps)),
            forecast,
            state,
            loss_fn: CrossEntropyLossConfig::new().init(worker.device()),
            position,
            saver,
            interrupted: false,
            progress,
            losses: Vec::new(),
            seconds: Vec::new(),
            tokens: 0,
            sent_bytes: 0,
            epoch_loss: 0.0,
            scores: None,
        })
    }

    /// Trains for the epochs that are left. Returns `None` if Ctrl-C ended the run.
    fn run(self) -> Result<Option<Summary>> {
        let mut trainer = self;
        while trainer.position.step < trainer.last_step {
            trainer = trainer.epoch()?;
            if trainer.interrupted {
                return Ok(None);
            }
        }
        trainer.finish().map(Some)
    }

    /// Trains on the batches that are left in the current epoch, then evaluates.
    ///
    /// The trainer is passed by value because Burn's optimizers take the model by value.
    fn epoch(mut self) -> Result<Self> {
        let begin = Instant::now();
        let first = self.losses.len();
        let batches = self.dealer.epoch(&self.lengths, self.job.recipe.seed, self.position.epoch);
        let taken = self.position.examples / self.dealer.global_batch();
        let steps_left = self.last_step - self.position.step;
        for batch in batches.iter().skip(taken).take(steps_left) {
            self = self.step(batch)?;
            if self.saver.after_step(self.worker, self.position, &self.state)? {
                self.saver.finish(self.worker, self.position, &self.state)?;
                self.progress.note(&format!("saved after step {}", self.position.step));
                self.interrupted = true;
                return Ok(self);
            }
        }

        mean_over_ranks(&mut self.losses[first..], self.worker)?;
        self.epoch_loss = mean(&self.losses[first..]);
        let scores = self.evaluate()?;
        self.scores = Some(scores);
        let Position { step, epoch, examples } = self.position;
        let (number, train_loss) = (epoch + 1, self.epoch_loss);
        let Scores { accuracy, f1 } = scores;
        let line = format!(
            "epoch {number}  train loss {train_loss:.4}  accuracy {accuracy:.4}  F1 {f1:.4}  {:.1} s",
            begin.elapsed().as_secs_f64()
        );
        let numbers =
            [("train/epoch_loss", train_loss), ("valid/accuracy", accuracy), ("valid/f1", f1)];
        self.progress.result(step, &line, numbers);
        if examples / self.dealer.global_batch() >= self.steps_per_epoch {
            self.position = Position { step, epoch: epoch + 1, examples: 0 };
        }
        Ok(self)
    }

    /// Trains on one global batch: forward, backward, clipping and update.
    fn step(mut self, batch: &[usize]) -> Result<Self> {
        let begin = Instant::now();
        let Self { job, worker, .. } = self;
        let TrainingState { model, scaler, .. } = &mut self.state;
        let rows = self.dealer.share(batch, worker.rank().index());
        let padded = Padded::new(&job.dataset.train, rows, job.dataset.padding);
        let input = BertInput::new(padded, worker.device());
        let sent_before = model.stats().counts().sent_bytes;
        let logits = model.forward(input.ids, input.types, input.padding);
        let loss = self.loss_fn.forward(logits, input.labels);
        let value = loss.clone().inner();

        let gradients = model.backward(scale_loss(loss, scaler.as_ref()))?;
        self.sent_bytes += model.stats().counts().sent_bytes - sent_before;
        let gradients = unscale_gradients(model, gradients, scaler.as_mut())?;
        let rate = self.state.schedule.step();
        // A step whose gradients overflow in float16 changes no parameter.
        if let Unscaled::Finite(mut gradients) = gradients {
            self.state.model.clip_grad_norm(&mut gradients, job.recipe.max_norm)?;
            self.state.model = self.state.optimizer.step(rate.clone(), self.state.model, gradients);
            if self.seconds.is_empty() && job.memory.is_on() {
                // The first step allocated the optimizer's state.
                self.state.model.stats().record_optimizer(&self.state.optimizer)?;
            }
        }

        self.position.step += 1;
        self.position.examples += batch.len();
        let loss = read_loss(value)?;
        ensure!(
            loss.is_finite(),
            "the loss of step {} is {loss}; a lower --learning-rate may help",
            self.position.step
        );
        self.losses.push(loss);
        self.seconds.push(begin.elapsed().as_secs_f64());
        self.tokens += batch.iter().map(|row| self.lengths[*row]).sum::<usize>();
        self.progress.step(Step {
            number: self.position.step,
            loss,
            learning_rate: rate.base(),
            tokens_per_second: self.tokens as f64 / self.seconds.iter().sum::<f64>(),
            memory: None,
            left: None,
        });
        Ok(self)
    }

    /// Evaluates the model on the held-out split. Each rank takes a part of it.
    fn evaluate(&self) -> Result<Scores> {
        let dataset = &self.job.dataset;
        let device = self.worker.device().clone().inner();
        let model = self.state.model.valid();
        let lengths: Vec<usize> = dataset.test.iter().map(|example| example.ids.len()).collect();
        let mut counts = Counts::new(dataset.classes);
        for share in self.dealer.evaluation(&lengths, self.worker.rank().index()) {
            let padded = Padded::new(&dataset.test, &share.rows, dataset.padding);
            let input = BertInput::new(padded, &device);
            let logits = model.forward(input.ids, input.types, input.padding);
            let logits = logits.try_into_data()?.try_into_vec_as::<f32>()?;
            let guesses = logits.chunks_exact(dataset.classes).map(argmax);
            for (guess, row) in guesses.zip(&share.rows).take(share.counted) {
                counts.add(guess, dataset.test[*row].label);
            }
        }
        self.worker.all_reduce_sum(counts.as_mut_slice())?;
        Ok(counts.scores())
    }

    /// Saves the last checkpoint, exports the model and returns the summary.
    fn finish(mut self) -> Result<Summary> {
        self.saver.finish(self.worker, self.position, &self.state)?;
        let scores = match self.scores {
            Some(scores) => scores,
            // The run resumed from a checkpoint of its own end, and took no step.
            None => self.evaluate()?,
        };
        self.progress.finish();
        let model = &self.state.model;
        let job = self.job;
        match (&job.export, &job.lora) {
            (Some(export), None) => {
                model.state().save_pretrained(&export.folder, &export.options())?;
            }
            (Some(export), Some(_)) => {
                let options = lora::save_options(export, job.pretrained.as_deref());
                model.state().save_adapters(&export.folder, &options)?;
            }
            (None, _) => {}
        }

        let sent = self.sent_bytes / self.losses.len().max(1);
        let bytes = [model.stats().sharded_bytes(), model.stats().peak_unsharded_bytes(), sent];
        let [sharded, peak, sent] = max_over_ranks(bytes, self.worker)?;
        let seconds = self.seconds.iter().sum::<f64>().max(f64::MIN_POSITIVE);
        Ok(Summary {
            world_size: self.dealer.world_size,
            strategy: self.job.strategy.to_string(),
            num_params: model.stats().num_params(),
            sharded_bytes_per_rank: sharded,
            peak_unsharded_bytes: peak,
            sent_bytes_per_step: sent,
            steps: self.losses.len(),
            tokens_per_second: self.tokens as f64 / seconds,
            train_loss: self.epoch_loss,
            accuracy: scores.accuracy,
            f1: scores.f1,
            step_seconds_median: median(&self.seconds),
            losses: self.losses,
        })
    }
}

/// Returns the maximum over ranks of each number, with one all-reduce.
fn max_over_ranks<const N: usize>(own: [usize; N], worker: &Worker) -> Result<[usize; N]> {
    let (world, rank) = (worker.world().size(), worker.rank().index());
    // Each rank fills in its own elements and leaves the others 0, so that the sum is a gather.
    let mut all = vec![0.0; N * world];
    for (index, own) in own.into_iter().enumerate() {
        all[index * world + rank] = own as f64;
    }
    worker.all_reduce_sum(&mut all)?;
    let of_ranks = |index: usize| all[index * world..(index + 1) * world].iter();
    Ok(std::array::from_fn(|index| of_ranks(index).fold(0.0, |a, &b| f64::max(a, b)) as usize))
}
