//! The backward pass of a sharded model.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn::module::Param;
use burn::optim::GradientsParams;
use burn::tensor::{Gradients, Tensor};

use super::gradient_hook::GradientHook;
use super::ignored_gradients::{OwnGradients, scaled};
use super::model::Fsdp;
use super::optimizer_check::{OptimizerCheck, Waiting};
use crate::error::{Error, ScheduleError, panic_text};
use crate::layout::WorldSize;
use crate::module::{FsdpModule, ParamVisitor, Sharded};
use crate::param_group::memory::OptimizerStates;
use crate::runtime::schedule::ErasedSchedule;

impl<M: FsdpModule> Fsdp<M> {
    /// Backpropagates `loss`, a tensor of one element, and returns the gradients for the optimizer.
    /// Every rank calls it.
    ///
    /// The gradients are those of this rank's shards and of the replicated parameters, averaged
    /// over all ranks, and those of this rank's ignored parameters, not averaged.
    ///
    /// The mean over ranks weighs all ranks the same. Where they count different numbers of tokens, use
    /// [`backward_sum`](Self::backward_sum).
    ///
    /// # Errors
    ///
    /// [`CollectiveError`](crate::errors::CollectiveError) if another rank fails or does not take part
    /// within the time-out. [`ScheduleError`] if two units need the same gather buffer, if `loss` is not
    /// one element with autodiff or depends on no trained parameter, if an earlier backward pass has
    /// consumed its graph, or if an earlier micro-batch of the step has called
    /// [`accumulate_sum`](Self::accumulate_sum).
    pub fn backward(&self, loss: Tensor<1>) -> Result<GradientsParams, Error> {
        self.end_step_with(loss, None)
    }

    /// Backpropagates the loss of a micro-batch and keeps the gradients. Every rank calls it.
    ///
    /// The [`backward`](Self::backward) that ends the step returns the sum of the gradients of all
    /// micro-batches. For their mean, divide each loss by the number of micro-batches; where these
    /// count different numbers of tokens, use [`accumulate_sum`](Self::accumulate_sum).
    /// [`GradientAccumulation`](crate::options::GradientAccumulation) says what each micro-batch costs.
    ///
    /// # Errors
    ///
    /// The errors of [`backward`](Self::backward).
    pub fn accumulate(&self, loss: Tensor<1>) -> Result<(), Error> {
        self.continue_step_with(loss, None)
    }

    /// Backpropagates the loss of a step's last micro-batch, a sum where it has a weight, and returns the
    /// gradients of the step.
    pub(super) fn end_step_with(
        &self,
        loss: Tensor<1>,
        weight: Option<f64>,
    ) -> Result<GradientsParams, Error> {
        let _span = pass_span();
        let mut from = self.run_backward(loss, weight, false)?;
        self.collect_all_gradients(&mut from)
    }

    /// Backpropagates the loss of a micro-batch, a sum where it has a weight, and keeps the gradients.
    pub(super) fn continue_step_with(
        &self,
        loss: Tensor<1>,
        weight: Option<f64>,
    ) -> Result<(), Error> {
        let _span = pass_span();
        let mut from = self.run_backward(loss, weight, true)?;
        self.keep_gradients(&mut from)
    }

    /// Ends the backward pass of a micro-batch and keeps its gradients. `from` has those of ignored
    /// parameters.
    fn keep_gradients(&self, from: &mut impl OwnGradients) -> Result<(), Error> {
        let mut sums = GradientsParams::new();
        self.ignored_gradients.add(&self.module, from, &mut sums, None);
        self.ignored_gradients.keep(sums);
        self.schedule.finish_backward()
    }

    /// Runs `pass`, a function that calls `Tensor::backward` itself, and returns the gradients for
    /// the optimizer. Every rank calls it.
    ///
    /// `pass` gets the module, and returns Burn's gradients by parameter.
    ///
    /// `accumulate` says that another micro-batch of the step follows; no gradients are returned
    /// then.
    #[cfg(feature = "train")]
    pub(crate) fn run_pass<T>(
        &self,
        accumulate: bool,
        pass: impl FnOnce(&M) -> (GradientsParams, T),
    ) -> Result<(GradientsParams, T), Error> {
        let _span = pass_span();
        self.schedule.begin_backward(accumulate);
        let (mut own, value) = catch_backward(|| pass(&self.module))?;
        if accumulate {
            self.keep_gradients(&mut own)?;
            return Ok((GradientsParams::new(), value));
        }
        Ok((self.collect_all_gradients(&mut own)?, value))
    }

    /// Runs Burn's backward pass from a loss, which is a sum where it has a weight. `accumulate` says
    /// that another micro-batch of the step follows.
    fn run_backward(
        &self,
        loss: Tensor<1>,
        weight: Option<f64>,
        accumulate: bool,
    ) -> Result<Gradients, Error> {
        if loss.dims() != [1] || !loss.is_autodiff() {
            let context = if loss.is_autodiff() { "with" } else { "without" };
            let found = format!("a tensor of shape {:?} {context} autodiff", loss.dims());
            return Err(ScheduleError::InvalidLoss { found }.into());
        }
        if !self.schedule.is_tracked(loss.clone().into_dispatch()) {
            return Err(ScheduleError::UntrackedLoss.into());
        }
        let value = || loss.clone().into_data().iter::<f64>().sum();
        self.schedule.check_loss(&value)?;
        let added = self.schedule.add_loss(weight, accumulate)?;
        let loss = match added.factor {
            Some(factor) => loss.mul_scalar(factor),
            None => loss,
        };
        self.schedule.begin_backward(accumulate);
        catch_backward(|| loss.backward()).inspect_err(|_| self.schedule.remove_loss(added))
    }

    /// Completes a backward pass that the [`backward`](Self::backward) of another model ran, and
    /// returns the gradients of this model. Every rank calls it.
    ///
    /// Use it for a loss that depends on several sharded models: call `backward` on one of them,
    /// and this method on the others.
    ///
    /// # Errors
    ///
    /// The errors of [`backward`](Self::backward).
    pub fn collect_gradients(&self) -> Result<GradientsParams, Error> {
        Ok(self.collect_reduced_gradients()?.0)
    }

    /// Completes a backward pass and returns the gradients of the step. `from` has those of ignored
    /// parameters.
    fn collect_all_gradients(
        &self,
        from: &mut impl OwnGradients,
    ) -> Result<GradientsParams, Error> {
        let (mut gradients, factor) = self.collect_reduced_gradients()?;
        self.ignored_gradients.add(&self.module, from, &mut gradients, factor);
        Ok(gradients)
    }

    /// Completes a backward pass. Returns the gradients of sharded and replicated parameters, and the
    /// factor that they have been multiplied by, if it is not 1.
    fn collect_reduced_gradients(&self) -> Result<(GradientsParams, Option<f64>), Error> {
        self.schedule.finish_backward()?;
        let factor = self.schedule.end_losses();
        let check = &self.optimizer_check;
        let mut take = TakeGradients {
            schedule: &*self.schedule,
            check,
            states: &self.optimizer_states,
            hook: &self.gradient_hook,
            factor,
            gradients: GradientsParams::new(),
            waiting: Vec::new(),
            failed: None,
        };
        self.module.visit_params(&mut take);
        let TakeGradients { mut gradients, waiting, failed, .. } = take;
        failed.map_or(Ok(()), Err)?;
        if self.schedule.mesh().tensor_size() != WorldSize::ONE {
            self.schedule.check_whole_gradients(self.read_gradients(&gradients))?;
        }
        check.add_gradients(waiting, &mut gradients);
        Ok((gradients, factor))
    }
}

/// The visitor that takes the gradients of a backward pass from the schedule.
struct TakeGradients<'a> {
    schedule: &'a dyn ErasedSchedule,
    check: &'a OptimizerCheck,
    states: &'a OptimizerStates,
    hook: &'a GradientHook,
    /// Number that the gradients are multiplied by.
    factor: Option<f64>,
    gradients: GradientsParams,
    /// Trained shards whose optimizer has not been checked.
    waiting: Vec<Waiting>,
    /// First error of the hook.
    failed: Option<Error>,
}

impl ParamVisitor for TakeGradients<'_> {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(sharded) = Sharded::of(param) else { return };
        if let Some(gradient) = self.schedule.take_gradient(sharded.index) {
            let spec = self.schedule.spec(sharded.index);
            let gradient = scaled(Tensor::<D>::from_dispatch(gradient), self.factor);
            match self.hook.apply(spec, gradient) {
                Ok(gradient) => {
                    self.states.expect(param.id);
                    self.gradients.register(param.id, gradient);
                }
                Err(error) => _ = self.failed.get_or_insert(error),
            }
        }
        if self.check.is_open(param.id) {
            self.waiting.extend(Waiting::of(param, self.schedule.units()));
        }
    }
}

/// Runs `f`, and returns the typed [`Error`] if `f` unwinds with one. Other panics continue.
pub(super) fn catch_error<T>(f: impl FnOnce() -> T) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|panic: Box<dyn Any + Send>| {
        match panic.downcast::<Error>() {
            Ok(error) => *error,
            Err(panic) => resume_unwind(panic),
        }
    })
}

/// Runs `pass`, which calls Burn's backward, and returns the typed [`Error`] if it unwinds with one. It is
/// [`ScheduleError::GraphConsumed`] for the panic with which Burn refuses a graph that an earlier backward
/// pass has consumed. Other panics continue.
fn catch_backward<T>(pass: impl FnOnce() -> T) -> Result<T, Error> {
    let caught = catch_unwind(AssertUnwindSafe(|| catch_error(pass)));
    caught.unwrap_or_else(|panic: Box<dyn Any + Send>| match panic_text(&*panic) {
        Some(text) if text.contains("graph tape has already been consumed") => {
            Err(ScheduleError::GraphConsumed.into())
        }
        _ => resume_unwind(panic),
    })
}

/// Returns the span of a backward pass, from its begin to the last reduced gradient.
fn pass_span() -> tracing::span::EnteredSpan {
    tracing::trace_span!(target: "fsdp::trace", "fsdp::backward").entered()
}
