//! The training strategy for sharded models, and its options.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use burn::grad_clipping::GradientClipping;
use burn::module::Module;
use burn::train::{
    InferenceStep, Learner, LearningResult, SupervisedLearningStrategy,
    SupervisedTrainingEventProcessor, TrainLoader, TrainStep, TrainingComponents, TrainingStrategy,
    ValidLoader,
};

use super::checkpoints::{Resume, Stepper, restore};
use super::events::Events;
use super::fit::{Components, Fit, Loaders};
use super::handover;
use super::output::RankOutput;
use super::settings::{LearnerModel, Settings};
use crate::checkpoint::CheckpointManager;
use crate::error::{Error, IgnorePoison, LearnerError, raise};
use crate::fully_shard::Fsdp;
use crate::launch::Worker;

use crate::module::FsdpModule;
use crate::optim::WholeParam;

/// Burn's training strategy for a sharded model: pass it to
/// `SupervisedTraining::with_training_strategy`.
///
/// Every rank runs the training with the same settings. Rank 0 computes the metrics, from the
/// outputs of all ranks. Whether training stops, by early stopping or by an interrupter, is decided
/// for all ranks together, between optimizer steps.
///
/// | option | default |
/// |---|---|
/// | [`with_max_grad_norm`](Self::with_max_grad_norm) | no clipping |
/// | [`with_whole_param`](Self::with_whole_param) | the optimizer steps shards |
/// | [`with_checkpoints`](Self::with_checkpoints) | none |
/// | [`with_checkpoint_every`](Self::with_checkpoint_every) | at the end of each epoch only |
/// | [`with_resume_latest`](Self::with_resume_latest), [`with_resume_from`](Self::with_resume_from) | a new run |
/// | [`with_metric_interval`](Self::with_metric_interval) | metrics of every training batch |
/// | [`with_own_data_split`](Self::with_own_data_split) | training data comes from a `RankLoader` |
///
/// # Errors
///
/// `SupervisedTraining::launch` does not return a `Result`. It unwinds with an [`Error`], which
/// [`launch`](crate::launch()) returns. Settings that cannot be right with shards, and data that does
/// not suit the ranks, are a [`LearnerError`]. Errors of collectives and checkpoints keep their
/// types. The dashboard has given the terminal back by then.
#[derive(Debug)]
#[must_use]
pub struct FsdpStrategy {
    worker: Worker,
    settings: Settings,
    checkpoints: Mutex<Option<CheckpointManager>>,
}

impl FsdpStrategy {
    /// Creates the strategy of this rank.
    pub fn new(worker: &Worker) -> Self {
        let settings = Settings {
            max_grad_norm: None,
            whole_param: false,
            checkpoint_every: None,
            resume: Resume::Never,
            metric_interval: 1,
            own_data_split: false,
        };
        Self { worker: worker.clone(), settings, checkpoints: Mutex::new(None) }
    }

    /// Scales the gradients of each optimizer step so that their 2-norm over all ranks is at most
    /// `max_norm`.
    pub fn with_max_grad_norm(mut self, max_norm: f64) -> Self {
        self.settings.max_grad_norm = Some(max_norm);
        self
    }

    /// Steps full matrices, for an optimizer that needs them, such as Muon: see [`WholeParam`]. A
    /// `TrainStep::optimize` of the model's own is not called then.
    pub fn with_whole_param(mut self) -> Self {
        self.settings.whole_param = true;
        self
    }

    /// Saves a sharded checkpoint at the end of each epoch, and when training stops early: the
    /// model, the optimizer, the position in the data and the number of steps.
    pub fn with_checkpoints(self, manager: CheckpointManager) -> Self {
        Self { checkpoints: Mutex::new(Some(manager)), ..self }
    }

    /// Saves a checkpoint after every `steps` optimizer steps too, not only after each epoch.
    ///
    /// A run that resumes from such a checkpoint continues within the epoch. The metrics of that
    /// epoch then cover the batches after the checkpoint only.
    pub fn with_checkpoint_every(mut self, steps: u64) -> Self {
        self.settings.checkpoint_every = Some(steps.max(1));
        self
    }

    /// Continues from the newest checkpoint of [`with_checkpoints`](Self::with_checkpoints).
    /// Without any, a new run starts. The learning-rate scheduler is stepped as often as the optimizer was.
    pub fn with_resume_latest(mut self) -> Self {
        self.settings.resume = Resume::Latest;
        self
    }

    /// Continues from the checkpoint in a folder. It may be saved at any number of ranks.
    pub fn with_resume_from(mut self, folder: impl Into<PathBuf>) -> Self {
        self.settings.resume = Resume::Folder(folder.into());
        self
    }

    /// Sets the interval of metrics: every `batches`-th training batch goes to them, at least 1,
    /// and the last batch of an epoch. Each such batch's output is copied from every rank's device
    /// to rank 0.
    pub fn with_metric_interval(mut self, batches: usize) -> Self {
        self.settings.metric_interval = batches.max(1);
        self
    }

    /// Accepts a training data loader other than [`RankLoader`](super::RankLoader): the program
    /// gives each rank its part of the dataset itself.
    ///
    /// At several ranks, training on another loader is otherwise
    /// [`LearnerError::UnsplitData`], because Burn's own loaders give every rank all of the data.
    /// The batches of a step must have the same number of items on all ranks, as
    /// [`Progress::items_processed`](burn::data::dataloader::Progress) counts them. A loader whose
    /// batches differ in size by intent reports its progress in batches.
    pub fn with_own_data_split(mut self) -> Self {
        self.settings.own_data_split = true;
        self
    }

    /// Runs the training. Every rank calls it.
    fn run<M>(
        &self,
        mut learner: Learner<Fsdp<M>>,
        loaders: Loaders<M>,
        components: Components,
        events: &mut Events<Fsdp<M>>,
    ) -> Result<Fsdp<M>, Error>
    where
        M: LearnerModel,
        <M as TrainStep>::Output: RankOutput,
        <M as InferenceStep>::Output: RankOutput,
    {
        let (mut model, optimizer) = handover::take(&mut learner);
        if let (false, Some(GradientClipping::Norm(max_norm))) =
            (self.settings.whole_param, optimizer.grad_clipping())
        {
            return Err(LearnerError::NormClipping { max_norm: max_norm.to_string() }.into());
        }
        let mut stepper = if self.settings.whole_param {
            Stepper::WholeParams(WholeParam::new(optimizer))
        } else {
            Stepper::Shards(optimizer)
        };
        let mut checkpoints = self.checkpoints.lock().ignore_poison();
        let manager = checkpoints.as_mut();
        let resume = &self.settings.resume;
        let resumed = restore(resume, manager.as_deref(), &self.worker, &mut model, &mut stepper)?;
        let fit = Fit {
            worker: &self.worker,
            settings: &self.settings,
            components,
            learner,
            stepper,
            events,
            manager,
            progress: resumed.progress,
            order: resumed.order,
        };
        fit.run(model, loaders)
    }
}

/// Checks the settings that a sharded model cannot use.
fn check<M: LearnerModel>(components: &TrainingComponents<Fsdp<M>>) -> Result<(), LearnerError> {
    if components.checkpointer.is_some() {
        return Err(LearnerError::BurnCheckpointer);
    }
    match components.checkpoint {
        Some(epoch) => Err(LearnerError::BurnCheckpoint { epoch }),
        None => Ok(()),
    }
}

impl<M> SupervisedLearningStrategy<Fsdp<M>> for FsdpStrategy
where
    M: FsdpModule + TrainStep + InferenceStep + 'static,
    <M as TrainStep>::Output: RankOutput,
    <M as InferenceStep>::Output: RankOutput,
{
    /// Trains the model.
    ///
    /// # Panics
    ///
    /// Unwinds with the errors of [`FsdpStrategy`]; `launch` returns them.
    fn train(
        &self,
        learner: Learner<Fsdp<M>>,
        train: TrainLoader<Fsdp<M>>,
        valid: ValidLoader<Fsdp<M>>,
        components: TrainingComponents<Fsdp<M>>,
    ) -> LearningResult<Fsdp<M>> {
        let checked = check(&components);
        let interrupter = components.interrupter.clone();
        let leads = self.worker.is_rank_zero();
        let mut events = Events::new(components.event_processor, interrupter.clone(), leads);
        let summary = components.summary;
        let components = Components {
            num_epochs: components.num_epochs,
            label: components.label,
            accumulation: components.grad_accumulation.unwrap_or(1),
            interrupter: components.interrupter,
            early_stopping: components.early_stopping,
            event_store: components.event_store,
        };
        let run = || {
            checked?;
            self.run(learner, Loaders { train, valid }, components, &mut events)
        };
        let model = match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(model)) => model,
            Ok(Err(error)) => {
                events.abandon();
                raise(error)
            }
            Err(panic) => {
                events.abandon();
                resume_unwind(panic)
            }
        };
        // Before the end of the run, which makes the dashboard reset the interrupter.
        let (interrupted, error) = (interrupter.interruption(), interrupter.error());
        // Burn does not let a strategy add the model's name to the summary.
        let summary = summary.filter(|_| leads).and_then(|summary| summary.init().ok());
        let renderer = events.end(summary);
        LearningResult { model: Module::valid(&model), renderer, interrupted, error }
    }

    /// Panics: Burn never calls it, because [`train`](Self::train) does all of the work.
    fn fit(
        &self,
        _: TrainingComponents<Fsdp<M>>,
        _: Learner<Fsdp<M>>,
        _: TrainLoader<Fsdp<M>>,
        _: ValidLoader<Fsdp<M>>,
        _: usize,
    ) -> (Fsdp<M>, SupervisedTrainingEventProcessor<Fsdp<M>>) {
        unreachable!("`FsdpStrategy::train` does not call `fit`")
    }
}

impl<M> From<FsdpStrategy> for TrainingStrategy<Fsdp<M>>
where
    M: FsdpModule + TrainStep + InferenceStep + 'static,
    <M as TrainStep>::Output: RankOutput,
    <M as InferenceStep>::Output: RankOutput,
{
    fn from(strategy: FsdpStrategy) -> Self {
        Self::Custom(Arc::new(strategy))
    }
}
