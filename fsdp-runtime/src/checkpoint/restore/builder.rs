//! The objects that a checkpoint is loaded into.

use std::collections::BTreeMap;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::ModuleOptimizer;
use serde_json::Value;

use crate::checkpoint::manifest::Progress;
use crate::checkpoint::sharded_model::ShardedModel;
use crate::fully_shard::Fsdp;
use crate::module::FsdpModule;
use crate::optim::{EmaModel, GradScaler, WholeParam};

/// Builder of a load: the models, optimizers and other state to load into, each under the name it
/// has in the checkpoint. Every rank must add the same names.
///
/// Everything else in the checkpoint is ignored, so that a model can be loaded for evaluation
/// without the optimizer. A model, optimizer or scheduler that is added must fit the checkpoint
/// exactly, but for [`with_strict`](Self::with_strict).
#[derive(Default)]
#[must_use]
pub struct Restore<'a> {
    pub(super) models: BTreeMap<String, &'a mut dyn ShardedModel>,
    pub(super) optimizers: BTreeMap<String, LoadedOptimizer<'a>>,
    pub(super) schedulers: BTreeMap<String, &'a mut ModuleLrScheduler>,
    pub(super) scalers: BTreeMap<String, &'a mut GradScaler>,
    /// Whether models may differ from the checkpoint.
    pub(super) lenient: bool,
}

/// An optimizer to load into.
pub(super) struct LoadedOptimizer<'a> {
    pub(super) optimizer: &'a mut ModuleOptimizer,
    /// Whether one owner rank steps each sharded matrix in full, as with [`WholeParam`].
    pub(super) whole: bool,
}

impl std::fmt::Debug for Restore<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Restore").field("models", &self.models.keys()).finish_non_exhaustive()
    }
}

/// Result of a load: the parts of a checkpoint that have no object to load into.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Restored {
    /// Position of the training run when the checkpoint was saved.
    pub progress: Progress,
    /// Number of ranks that saved the checkpoint.
    pub world_size: usize,
    /// Values added by [`Checkpoint::with_value`](crate::checkpoint::Checkpoint::with_value), by
    /// name.
    pub values: BTreeMap<String, Value>,
    /// Differences between the checkpoint and the models that were left as they are, with
    /// [`Restore::with_strict`]: parameters that are missing, unexpected, or of another shape.
    pub left: Vec<String>,
}

impl<'a> Restore<'a> {
    /// Returns a load without models.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a sharded model. The load also sets the state of each rank's random stream; a rank that
    /// the saving world did not have gets rank 0's.
    pub fn with_model<M: FsdpModule>(
        mut self,
        name: impl Into<String>,
        model: &'a mut Fsdp<M>,
    ) -> Self {
        self.models.insert(name.into(), model);
        self
    }

    /// Adds the moving average of a model, made by [`Ema::of`](crate::optim::Ema::of).
    pub fn with_average<M: FsdpModule>(
        self,
        name: impl Into<String>,
        average: &'a mut EmaModel<M>,
    ) -> Self {
        self.with_model(name, &mut average.model)
    }

    /// Sets whether models must fit the checkpoint, as they must by default. With `false` every
    /// parameter that fits is loaded, with its state in optimizers; other parameters keep their
    /// values, and [`Restored::left`] lists what was left. A model that the checkpoint lacks is an
    /// error.
    pub fn with_strict(mut self, strict: bool) -> Self {
        self.lenient = !strict;
        self
    }

    /// Adds an optimizer with the parameter groups that the saved one had. All models that it steps
    /// must be added too, before or after.
    pub fn with_optimizer(
        mut self,
        name: impl Into<String>,
        optimizer: &'a mut ModuleOptimizer,
    ) -> Self {
        self.optimizers.insert(name.into(), LoadedOptimizer { optimizer, whole: false });
        self
    }

    /// Adds an optimizer that steps full matrices. All models that it steps must be added too. Each
    /// matrix's state is loaded by the matrix's owner, whatever world size and strategy the
    /// checkpoint was saved with.
    pub fn with_whole_optimizer(
        mut self,
        name: impl Into<String>,
        optimizer: &'a mut WholeParam,
    ) -> Self {
        let optimizer = optimizer.inner_mut();
        self.optimizers.insert(name.into(), LoadedOptimizer { optimizer, whole: true });
        self
    }

    /// Adds a learning-rate scheduler, built with the same configuration as the saved one.
    pub fn with_scheduler(
        mut self,
        name: impl Into<String>,
        scheduler: &'a mut ModuleLrScheduler,
    ) -> Self {
        self.schedulers.insert(name.into(), scheduler);
        self
    }

    /// Adds a loss scaler. The load replaces both the configuration and the state by the saved
    /// ones.
    pub fn with_grad_scaler(mut self, name: impl Into<String>, scaler: &'a mut GradScaler) -> Self {
        self.scalers.insert(name.into(), scaler);
        self
    }
}
