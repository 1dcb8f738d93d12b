//! The objects whose state a checkpoint is to contain.

use std::collections::{BTreeMap, BTreeSet};

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::ModuleOptimizer;
use serde_json::Value;

use crate::checkpoint::manifest::Progress;
use crate::checkpoint::scalar::Scalars;
use crate::checkpoint::scheduler;
use crate::checkpoint::sharded_model::ShardedModel;
use crate::fully_shard::Fsdp;
use crate::module::FsdpModule;
use crate::optim::{EmaModel, GradScaler, WholeParam};

/// Builder of a checkpoint: the models, optimizers and other state to save, each under a name.
/// Every rank must add the same names.
#[derive(Default)]
#[must_use]
pub struct Checkpoint<'a> {
    pub(super) progress: Progress,
    pub(super) models: BTreeMap<String, &'a dyn ShardedModel>,
    /// Names of the models that are averages: their parameters have the ids of others, and no
    /// optimizer steps them.
    pub(super) averages: BTreeSet<String>,
    pub(super) optimizers: BTreeMap<String, SavedOptimizer<'a>>,
    pub(super) schedulers: BTreeMap<String, Scalars>,
    pub(super) scalers: BTreeMap<String, Scalars>,
    pub(super) values: BTreeMap<String, String>,
}

/// An optimizer to save.
#[derive(Clone, Copy)]
pub(super) struct SavedOptimizer<'a> {
    pub(super) optimizer: &'a ModuleOptimizer,
    /// Whether one owner rank steps each sharded matrix in full, as with [`WholeParam`].
    pub(super) whole: bool,
}

impl std::fmt::Debug for Checkpoint<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.summary())
    }
}

impl<'a> Checkpoint<'a> {
    /// Returns a checkpoint without models, taken after `step` optimizer steps.
    pub fn new(step: u64) -> Self {
        Self { progress: Progress { step, ..Progress::default() }, ..Self::default() }
    }

    /// Sets the position in the data: the number of completed passes, and the sampler's position in
    /// the current pass. Both are 0 by default.
    pub fn with_data_position(mut self, epoch: u64, position: u64) -> Self {
        (self.progress.epoch, self.progress.position) = (epoch, position);
        self
    }

    /// Sets the factor by which the loss is multiplied, for programs that scale the loss without a
    /// [`GradScaler`].
    pub fn with_loss_scale(mut self, scale: f32) -> Self {
        self.progress.loss_scale = Some(scale);
        self
    }

    /// Adds a model: its parameters and the state of its random stream.
    pub fn with_model<M: FsdpModule>(
        mut self,
        name: impl Into<String>,
        model: &'a Fsdp<M>,
    ) -> Self {
        self.models.insert(name.into(), model);
        self
    }

    /// Adds the moving average of a model, as a model of its own.
    pub fn with_average<M: FsdpModule>(
        mut self,
        name: impl Into<String>,
        average: &'a EmaModel<M>,
    ) -> Self {
        let name = name.into();
        self.averages.insert(name.clone());
        self.with_model(name, &average.model)
    }

    /// Adds an optimizer. All models that it steps must be added too, before or after.
    pub fn with_optimizer(
        mut self,
        name: impl Into<String>,
        optimizer: &'a ModuleOptimizer,
    ) -> Self {
        self.optimizers.insert(name.into(), SavedOptimizer { optimizer, whole: false });
        self
    }

    /// Adds an optimizer that steps full matrices. All models that it steps must be added too. Each
    /// matrix's state is written by the matrix's owner, and loaded by the owner in the loading
    /// world.
    pub fn with_whole_optimizer(
        mut self,
        name: impl Into<String>,
        optimizer: &'a WholeParam,
    ) -> Self {
        let optimizer = optimizer.inner();
        self.optimizers.insert(name.into(), SavedOptimizer { optimizer, whole: true });
        self
    }

    /// Adds a learning-rate scheduler.
    pub fn with_scheduler(
        mut self,
        name: impl Into<String>,
        scheduler: &ModuleLrScheduler,
    ) -> Self {
        self.schedulers.insert(name.into(), scheduler::scalars(&scheduler.to_record()));
        self
    }

    /// Adds a loss scaler, and sets the checkpoint's [`loss_scale`](Progress::loss_scale) to its
    /// scale.
    pub fn with_grad_scaler(mut self, name: impl Into<String>, scaler: &GradScaler) -> Self {
        self.scalers.insert(name.into(), scaler.scalars());
        self.with_loss_scale(scaler.loss_scale())
    }

    /// Adds any other value, stored as JSON. Rank 0's value is saved. Reading a float back may
    /// change its last bit, unless the program enables serde_json's feature `float_roundtrip`.
    pub fn with_value(mut self, name: impl Into<String>, value: impl Into<Value>) -> Self {
        self.values.insert(name.into(), value.into().to_string());
        self
    }

    /// Returns a line of text that must be equal on every rank.
    pub(super) fn summary(&self) -> String {
        fn names<T>(map: &BTreeMap<String, T>) -> String {
            map.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
        }
        format!(
            "step {}, models [{}], optimizers [{}], schedulers [{}], scalers [{}]",
            self.progress.step,
            names(&self.models),
            names(&self.optimizers),
            names(&self.schedulers),
            names(&self.scalers)
        )
    }
}
