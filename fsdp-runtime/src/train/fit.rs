//! The epochs and steps of a training run.

use std::sync::Arc;

use burn::data::dataloader::{DataLoader, DataLoaderIterator};
use burn::data::dataset::DatasetError;
use burn::optim::GradientsParams;
use burn::tensor::Device;
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    CloneEarlyStoppingStrategy, InferenceStep, Interrupter, Learner, LearnerEvent, TrainLoader,
    TrainStep, TrainingItem, ValidLoader,
};

use super::checkpoints::{Resumed, Stepper, save, start};
use super::events::Events;
use super::output::RankOutput;
use super::position::{DataOrder, Position, in_training, starting_at};
use super::seen::Seen;
use super::settings::{LearnerModel, Settings};
use super::steps::train_step;
use super::turn::{Turn, Turns};
use crate::checkpoint::{CheckpointManager, Progress};
use crate::error::{Error, LearnerError};
use crate::fully_shard::Fsdp;
use crate::launch::Worker;
use crate::layout::WorldSize;

/// The parts of Burn's `TrainingComponents` that the epochs need.
pub(super) struct Components {
    pub(super) num_epochs: usize,
    pub(super) label: Option<String>,
    /// Number of batches in an optimizer step.
    pub(super) accumulation: usize,
    pub(super) interrupter: Interrupter,
    pub(super) early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
    pub(super) event_store: Arc<EventStoreClient>,
}

/// The loaders of this rank's batches.
pub(super) struct Loaders<M: LearnerModel> {
    pub(super) train: TrainLoader<Fsdp<M>>,
    pub(super) valid: ValidLoader<Fsdp<M>>,
}

/// A training run on one rank.
pub(super) struct Fit<'a, M: LearnerModel> {
    pub(super) worker: &'a Worker,
    pub(super) settings: &'a Settings,
    pub(super) components: Components,
    /// Has the learning rates only: see [`handover`](super::handover).
    pub(super) learner: Learner<Fsdp<M>>,
    pub(super) stepper: Stepper,
    pub(super) events: &'a mut Events<Fsdp<M>>,
    pub(super) manager: Option<&'a mut CheckpointManager>,
    pub(super) progress: Progress,
    /// Order of the training data: in the checkpoint before [`Fit::run`], then of this run.
    pub(super) order: Option<DataOrder>,
}

/// End of an epoch of training.
enum Ended {
    AtItsLastBatch,
    Stopped,
}

/// A rank's next batch, and the turns that all ranks exchanged before it.
struct Next<'a, O, T> {
    turns: Turns<'a>,
    item: Option<O>,
    /// Outputs of the previous batch, for the metrics.
    seen: Vec<TrainingItem<T>>,
}

impl<'a, M> Fit<'a, M>
where
    M: LearnerModel,
    <M as TrainStep>::Output: RankOutput,
    <M as InferenceStep>::Output: RankOutput,
{
    /// Trains all epochs and returns the model. Every rank calls it.
    pub(super) fn run(mut self, mut model: Fsdp<M>, loaders: Loaders<M>) -> Result<Fsdp<M>, Error> {
        let device = self.worker.device().clone();
        let train = loaders.train.to_device(&device);
        let valid = loaders.valid.to_device(&device.inner());
        let (train_items, order) = in_training(|| train.num_items());
        self.check_order(order)?;
        let mut totals = [train_items as f64, valid.num_items() as f64];
        self.worker.all_reduce_sum(&mut totals)?;
        let [train_items, valid_items] = totals.map(|items| items as usize);
        let start = start(self.progress, self.worker.world().size());
        self.start_events(start);
        self.replay(start);
        skip_epochs(&*train, start.epoch);
        skip_epochs(&*valid, start.epoch);

        for epoch in start.epoch as usize + 1..=self.components.num_epochs {
            let position = if epoch as u64 == start.epoch + 1 { start.items } else { 0 };
            let position = Position { epoch: epoch as u64 - 1, items: position, trains: true };
            self.events
                .train(LearnerEvent::StartSplit { epoch_number: epoch, total_items: train_items });
            let (trained, ended) = self.train_epoch(model, &*train, position)?;
            model = trained;
            self.events.train(LearnerEvent::EndSplit(epoch));
            if matches!(ended, Ended::Stopped) {
                self.save(&model)?;
                break;
            }

            self.events
                .valid(LearnerEvent::StartSplit { epoch_number: epoch, total_items: valid_items });
            let stopped = self.validate(&model, &*valid, epoch)?;
            self.events.valid(LearnerEvent::EndSplit(epoch));
            self.events.train(LearnerEvent::EndEpoch(epoch));
            self.progress = Progress { epoch: epoch as u64, position: 0, ..self.progress };
            self.save(&model)?;
            if stopped || self.stops_early(epoch)? {
                break;
            }
        }
        if let Some(manager) = &mut self.manager {
            manager.finish()?;
        }
        Ok(model)
    }

    /// Checks that the items of the training loader are those of the other ranks, and those that the
    /// position of a resumed run refers to. Every rank calls it.
    fn check_order(&mut self, order: Option<DataOrder>) -> Result<(), Error> {
        let saved = std::mem::replace(&mut self.order, order);
        let all = self.worker.exchange_as("all_gather", "the order of the training data", order)?;
        let (Some(order), Some(first)) = (order, *all[0]) else { return Ok(()) };
        let ranks = self.worker.world().ranks().zip(&all);
        let mut orders = ranks.filter_map(|(rank, order)| Some((rank, (**order)?)));
        if let Some((rank, found)) = orders.find(|(_, order)| !order.has_items_of(first)) {
            let (found, expected) = (found.to_string(), first.to_string());
            return Err(LearnerError::DataMismatch { rank, found, expected }.into());
        }
        let Some(saved) = saved else { return Ok(()) };
        if self.progress.position > 0 && !order.has_items_of(saved) {
            let (epoch, saved) = (self.progress.epoch as usize + 1, saved.to_string());
            return Err(LearnerError::OtherData { epoch, saved, found: order.to_string() }.into());
        }
        if order.batch != saved.batch {
            tracing::warn!(
                target: "fsdp",
                "the checkpoint was saved with batches of {} items of all ranks, and they now have {}: a \
                 learning-rate schedule that counts steps is another one by items",
                saved.batch,
                order.batch
            );
        }
        Ok(())
    }

    fn start_events(&mut self, start: Position) {
        let label = self.components.label.clone();
        let (total_epochs, starting_epoch) = (self.components.num_epochs, start.epoch as usize + 1);
        self.events.train(LearnerEvent::Start { total_epochs, starting_epoch, label });
    }

    /// Repeats the steps of the learning rates and of early stopping that a resumed run had taken.
    fn replay(&mut self, start: Position) {
        (0..self.progress.step).for_each(|_| self.learner.lr_step());
        if self.events.leads()
            && let Some(early_stopping) = &mut self.components.early_stopping
        {
            for epoch in 1..=start.epoch as usize {
                early_stopping.should_stop(epoch, &self.components.event_store);
            }
        }
    }

    /// Trains on the batches of an epoch from `start`. Every rank calls it.
    fn train_epoch(
        &mut self,
        mut model: Fsdp<M>,
        loader: &dyn DataLoader<<M as TrainStep>::Input>,
        start: Position,
    ) -> Result<(Fsdp<M>, Ended), Error> {
        let (mut iterator, splits) = iterate(loader, start)?;
        let own_data_split = splits || self.settings.own_data_split;
        if !own_data_split && self.worker.world() != WorldSize::ONE {
            return Err(LearnerError::UnsplitData { world: self.worker.world() }.into());
        }
        let mut seen = Seen::new(self.metric_device());
        let (mut batch, mut accumulated) = (0, 0);
        loop {
            batch += 1;
            let Next { turns, item, seen: outputs } = self.next(&mut *iterator, &mut seen)?;
            for output in outputs {
                self.events.train(LearnerEvent::ProcessedItem(output));
            }
            if !turns.all_have_batches(batch)? {
                break;
            }
            // Not within a step: its gradients would be lost.
            if let (Some(reason), 0) = (turns.stop(), accumulated) {
                self.stop(reason);
                return Ok((model, Ended::Stopped));
            }
            let progress = turns.progress();
            let item = item.expect("this rank has a batch, as all ranks do");
            let ends_step =
                accumulated + 1 == self.components.accumulation || progress.is_completed();
            let output = train_step(&model, item, !ends_step)?;
            accumulated = if ends_step { 0 } else { accumulated + 1 };
            if ends_step {
                model = self.step(model, output.grads)?;
                self.progress.position = progress.items_processed as u64;
                self.save_after_step(&model, progress.is_completed())?;
            }
            if batch % self.settings.metric_interval == 0 || progress.is_completed() {
                let lr = Some(self.learner.lr_current());
                seen.add(output.item, progress, batch, lr, self.worker)?;
            }
        }
        if accumulated > 0 {
            let (epoch, batches) = (start.epoch as usize + 1, accumulated);
            return Err(LearnerError::UnfinishedAccumulation { epoch, batches }.into());
        }
        Ok((model, Ended::AtItsLastBatch))
    }

    /// Takes the next batch of this rank and exchanges turns with the others. Every rank calls it.
    fn next<O, T: RankOutput>(
        &self,
        iterator: &mut dyn DataLoaderIterator<O>,
        seen: &mut Seen<T>,
    ) -> Result<Next<'a, O, T>, Error> {
        let seen = seen.take(self.worker)?;
        let (turn, item) = Turn::next(iterator, &self.components.interrupter);
        let turns = turn.exchange(self.worker)?;
        Ok(Next { turns, item, seen })
    }

    /// Updates the model. Every rank calls it.
    fn step(&mut self, model: Fsdp<M>, mut gradients: GradientsParams) -> Result<Fsdp<M>, Error> {
        if let Some(max_norm) = self.settings.max_grad_norm {
            model.clip_grad_norm(&mut gradients, max_norm)?;
        }
        self.learner.lr_step();
        self.progress.step += 1;
        self.stepper.step(self.learner.lr_current(), model, gradients)
    }

    /// Runs the model on all validation batches; a rank without further ones takes part with its
    /// first. Returns whether training is to stop. Every rank calls it.
    fn validate(
        &mut self,
        model: &Fsdp<M>,
        loader: &dyn DataLoader<<M as InferenceStep>::Input>,
        epoch: usize,
    ) -> Result<bool, Error> {
        let model = model.valid();
        let start = Position { epoch: epoch as u64 - 1, ..Position::default() };
        let (mut iterator, _) = iterate(loader, start)?;
        let mut seen = Seen::new(self.metric_device());
        let mut batch = 0;
        loop {
            batch += 1;
            let Next { turns, item, seen: outputs } = self.next(&mut *iterator, &mut seen)?;
            for output in outputs {
                self.events.valid(LearnerEvent::ProcessedItem(output));
            }
            if !turns.any_has_batch() {
                return Ok(false);
            }
            if let (1, Some(rank)) = (batch, turns.first_without()) {
                return Err(LearnerError::NoValidationBatch { rank }.into());
            }
            if let Some(reason) = turns.stop() {
                self.stop(reason);
                return Ok(true);
            }
            let progress = turns.progress();
            match item {
                Some(item) => {
                    let output = InferenceStep::step(&model, item);
                    seen.add(output, progress, batch, None, self.worker)?;
                }
                None => {
                    let again = iterate(loader, start)?.0.next();
                    let item = again.expect("every rank had a first batch");
                    let failed = |error: DatasetError| LearnerError::Data {
                        rank: self.worker.rank(),
                        reason: error.to_string(),
                    };
                    InferenceStep::step(&model, item.map_err(failed)?);
                    seen.add_none(progress, batch);
                }
            }
        }
    }

    /// Returns whether rank 0's early stopping ends the training. Every rank calls it.
    fn stops_early(&mut self, epoch: usize) -> Result<bool, Error> {
        let Some(early_stopping) = &mut self.components.early_stopping else { return Ok(false) };
        let mut stops = false;
        if self.events.leads() {
            self.events.flush();
            stops = early_stopping.should_stop(epoch, &self.components.event_store);
        }
        let all = self.worker.exchange_as("all_gather", "early stopping", stops)?;
        Ok(*all[0])
    }

    /// Notes on a rank that another one's interrupter has stopped the training.
    fn stop(&self, reason: &str) {
        if !self.components.interrupter.should_stop() {
            self.components.interrupter.stop(Some(reason));
        }
    }

    fn save_after_step(&mut self, model: &Fsdp<M>, ends_epoch: bool) -> Result<(), Error> {
        let due = |every| self.progress.step.is_multiple_of(every);
        // The checkpoint at the end of the epoch follows.
        if ends_epoch || !self.settings.checkpoint_every.is_some_and(due) {
            return Ok(());
        }
        self.save(model)
    }

    fn save(&mut self, model: &Fsdp<M>) -> Result<(), Error> {
        match &mut self.manager {
            Some(manager) => {
                let state = Resumed { progress: self.progress, order: self.order };
                save(manager, state, model, &self.stepper)
            }
            None => Ok(()),
        }
    }

    /// Returns the device on which metrics are computed.
    fn metric_device(&self) -> Device {
        self.worker.device().clone().inner()
    }
}

/// Begins the first `epochs` epochs of a loader that does not take positions, as every loader but
/// [`RankLoader`](super::RankLoader). This brings its shuffling to the epoch after them.
fn skip_epochs<O>(loader: &dyn DataLoader<O>, epochs: u64) {
    for epoch in 0..epochs {
        let start = Position { epoch, ..Position::default() };
        let (_, taken) = starting_at(start, || loader.iter());
        if taken {
            return;
        }
    }
}

/// Returns the iterator of a loader that starts at `position`, and whether the loader takes
/// positions. Batches before the position are dropped if it does not.
///
/// # Errors
///
/// [`LearnerError::PositionBeyondData`] if the loader ends before the position.
fn iterate<'a, O>(
    loader: &'a dyn DataLoader<O>,
    position: Position,
) -> Result<(Box<dyn DataLoaderIterator<O> + 'a>, bool), Error> {
    let (mut iterator, taken) = starting_at(position, || loader.iter());
    let total = iterator.progress().items_total;
    if !taken && (1..=position.items).contains(&total) {
        return Err(position.beyond(total).into());
    }
    while !taken && iterator.progress().items_processed < position.items {
        // An error is returned again, or follows, when the batches after it are used.
        match iterator.next() {
            Some(Ok(_)) => {}
            Some(Err(_)) => break,
            None => return Err(position.beyond(iterator.progress().items_processed).into()),
        }
    }
    Ok((iterator, taken))
}
