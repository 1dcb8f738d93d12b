//! Log of a run: losses and durations of its updates, and the lines at intervals and at the ends of
//! epochs.

use anyhow::Result;
use fsdp_runtime::prelude::*;

use crate::common::tensorboard::TensorBoard;
use crate::common::training::mean_over_ranks;
use crate::fairseq_log::{Evaluation, LogLine, LogPosition, LogWindow, UpdateStats};
use crate::job::Job;
use crate::logger::Logger;

/// One rank's log of a run. Rank 0 writes it.
pub struct RunLog {
    logger: Logger,
    board: TensorBoard,
    /// Updates since the last line.
    inner: LogWindow,
    /// Updates of the current epoch.
    epoch: LogWindow,
    /// Loss of every update since the run started or resumed, in base 2: the mean over ranks up to
    /// `averaged`, this rank's own after it.
    losses: Vec<f64>,
    averaged: usize,
    /// Number of losses at the last line, and at the start of the epoch.
    logged: usize,
    epoch_start: usize,
    /// Mean loss of the updates of the last line, in base 2.
    train_loss: f64,
    /// Duration of every update and of every overflow.
    seconds: Vec<f64>,
    /// Number of samples trained on, over all ranks, those of overflows included.
    samples: usize,
}

impl RunLog {
    /// Returns an empty log.
    pub fn new(job: &Job, worker: &Worker) -> Self {
        let recipe = &job.setup.recipe;
        let window = |prefix| LogWindow::new(prefix, recipe.tokens_per_sample, recipe.clip_norm);
        let (logger, board) = match worker.rank().index() {
            0 => (job.logger.clone(), job.board.clone()),
            _ => Default::default(),
        };
        Self {
            logger,
            board,
            inner: window(""),
            epoch: window("train_"),
            losses: Vec::new(),
            averaged: 0,
            logged: 0,
            epoch_start: 0,
            train_loss: 0.0,
            seconds: Vec::new(),
            samples: 0,
        }
    }

    /// Writes a note. `logger` is the part of fairseq that writes the like.
    pub fn note(&self, logger: &str, text: &str) {
        self.logger.note(logger, text);
    }

    /// Records an update. `loss` is in base e.
    pub fn update(&mut self, loss: f64, update: UpdateStats) {
        self.losses.push(loss / std::f64::consts::LN_2);
        self.seconds.push(update.seconds);
        self.samples += update.samples;
        self.inner.update(update);
        self.epoch.update(update);
    }

    /// Records an overflow: its duration in seconds and the number of its samples.
    pub fn overflow(&mut self, seconds: f64, samples: usize) {
        self.seconds.push(seconds);
        self.samples += samples;
        self.inner.overflow(seconds);
        self.epoch.overflow(seconds);
    }

    /// Averages the losses over ranks, and writes the line of the updates since the last one. Every
    /// rank calls it.
    ///
    /// # Errors
    ///
    /// If a peer fails.
    pub fn updates(&mut self, position: LogPosition, worker: &Worker) -> Result<()> {
        self.average(worker)?;
        self.train_loss = mean(&self.losses[self.logged..]);
        self.logged = self.losses.len();
        let line = self.inner.line(position, self.train_loss);
        self.line("train_inner", &line, position)
    }

    /// Writes the line of an evaluation.
    ///
    /// # Errors
    ///
    /// If the line cannot be serialized.
    pub fn evaluation(&self, evaluation: &Evaluation, position: &LogPosition) -> Result<()> {
        self.line("valid", &evaluation.line(position.epoch, position.updates), *position)
    }

    /// Averages the losses over ranks, and writes the line of the epoch. Every rank calls it.
    ///
    /// # Errors
    ///
    /// If a peer fails.
    pub fn epoch(&mut self, position: LogPosition, worker: &Worker) -> Result<()> {
        self.average(worker)?;
        let end = format!("end of epoch {} (average epoch stats below)", position.epoch + 1);
        self.note("fairseq_cli.train", &end);
        let line = self.epoch.line(position, mean(&self.losses[self.epoch_start..]));
        self.epoch_start = self.losses.len();
        self.line("train", &line, position)
    }

    /// Returns the number of updates since the run started or resumed.
    pub fn count(&self) -> usize {
        self.losses.len()
    }

    /// Returns the number of updates since the last line.
    pub fn pending(&self) -> usize {
        self.losses.len() - self.logged
    }

    /// Returns the mean loss of the updates of the last line, in base 2.
    pub fn train_loss(&self) -> f64 {
        self.train_loss
    }

    /// Returns the number of samples trained on, over all ranks.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// Returns the durations of all updates and overflows.
    pub fn seconds(&self) -> &[f64] {
        &self.seconds
    }

    /// Returns the losses of all updates, in base 2.
    pub fn into_losses(self) -> Vec<f64> {
        self.losses
    }

    fn average(&mut self, worker: &Worker) -> Result<()> {
        mean_over_ranks(&mut self.losses[self.averaged..], worker)?;
        self.averaged = self.losses.len();
        Ok(())
    }

    fn line(&self, logger: &str, line: &LogLine, position: LogPosition) -> Result<()> {
        self.board.numbers(position.updates, line.scalars(logger));
        self.logger.numbers(logger, line)
    }
}

/// Returns the mean; 0 for no values.
fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}
