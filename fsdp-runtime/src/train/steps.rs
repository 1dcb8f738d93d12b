//! Burn's training and inference steps on a sharded model.

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::train::{InferenceStep, TrainOutput, TrainStep};
use fsdp_kernels::batched_steps;

use super::handover;
use super::mean_loss::StepScope;
use crate::error::{Error, raise};
use crate::fully_shard::Fsdp;
use crate::module::FsdpModule;

/// A training step on the sharded model. The module's own step runs with its plain
/// `loss.backward()`.
impl<M: FsdpModule + TrainStep + 'static> TrainStep for Fsdp<M> {
    type Input = M::Input;
    type Output = M::Output;

    /// Runs the module's step. The gradients are those of [`Fsdp::backward`], or of
    /// [`Fsdp::backward_sum`] if the step calls [`mean_loss`](super::mean_loss()). Every rank calls it.
    ///
    /// # Panics
    ///
    /// Unwinds with the [`Error`] if a collective fails; `launch` returns the error.
    fn step(&self, item: M::Input) -> TrainOutput<M::Output> {
        train_step(self, item, false).unwrap_or_else(|error| raise(error))
    }

    /// Runs the module's `optimize`.
    ///
    /// # Panics
    ///
    /// Unwinds with the [`Error`] if the optimizer steps shards otherwise than whole parameters;
    /// `launch` returns the error.
    fn optimize(
        self,
        optimizer: &mut ModuleOptimizer,
        lr: ModuleLearningRate,
        gradients: GradientsParams,
    ) -> Self {
        if handover::is_armed() {
            return handover::give(self, optimizer);
        }
        // The module's `optimize` maps the module itself, and not the sharded model that checks.
        if self.optimizer_check.is_waiting()
            && let Err(error) = self.check_optimizer(optimizer)
        {
            raise(error);
        }
        // As in `Module::map`: steps of several parameters can share a kernel launch.
        batched_steps::scope(|| self.map_module(|module| module.optimize(optimizer, lr, gradients)))
    }
}

/// An inference step on the sharded model: the module's own.
impl<M: FsdpModule + InferenceStep> InferenceStep for Fsdp<M> {
    type Input = M::Input;
    type Output = M::Output;

    /// Runs the module's step. Every rank calls it.
    fn step(&self, item: M::Input) -> M::Output {
        InferenceStep::step(&**self, item)
    }
}

/// Runs the module's training step. With `accumulate`, the gradients stay in the sharded model
/// until the micro-batch that ends the step, and none are returned.
pub(super) fn train_step<M: FsdpModule + TrainStep>(
    model: &Fsdp<M>,
    item: M::Input,
    accumulate: bool,
) -> Result<TrainOutput<M::Output>, Error> {
    let pass = |module: &M| {
        let scope = StepScope::begin(model.schedule.clone(), accumulate);
        let TrainOutput { grads, item } = TrainStep::step(module, item);
        scope.end().unwrap_or_else(|error| raise(error));
        (grads, item)
    };
    let (grads, item) = model.run_pass(accumulate, pass)?;
    Ok(TrainOutput { grads, item })
}
