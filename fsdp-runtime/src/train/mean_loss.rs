//! The loss of a model's training step that is a sum over counted tokens.

use std::cell::RefCell;
use std::sync::Arc;

use burn::tensor::Tensor;

use crate::error::{Error, raise};
use crate::runtime::schedule::ErasedSchedule;

thread_local! {
    static STEP: RefCell<Option<OpenStep>> = const { RefCell::new(None) };
}

/// A training step of a sharded model's module that runs on this thread.
struct OpenStep {
    schedule: Arc<dyn ErasedSchedule>,
    accumulate: bool,
    /// Whether the module has called [`mean_loss`].
    has_sum: bool,
}

/// Returns the loss for `loss.backward()` in a model's [`TrainStep`](burn::train::TrainStep), given the sum
/// of this rank's losses and its weight: the number of losses in the sum, such as of tokens that are no
/// padding. Every rank calls it, once in each step.
///
/// In the step of a sharded model, the gradients are those of
/// [`Fsdp::backward_sum`](crate::Fsdp::backward_sum): of the sum over all ranks and the micro-batches of
/// `grads_accumulation`, divided by the sum of their weights. The returned loss is `sum` times the number of
/// ranks over the weight of the step's first micro-batch on all ranks. So its mean over the ranks is the
/// mean over all tokens, if the step has one micro-batch.
///
/// Elsewhere, as in validation and in an unsharded model, it returns `sum / weight`, or `sum` where the weight
/// is 0.
///
/// # Panics
///
/// In the step of a sharded model, unwinds with the errors of
/// [`Fsdp::backward_sum`](crate::Fsdp::backward_sum); `launch` returns them.
///
/// # Example
///
/// ```no_run
/// use burn::tensor::Tensor;
/// use burn::train::RegressionOutput;
/// use fsdp_runtime::train::mean_loss;
///
/// /// Returns the output of a batch whose rows count as `mask` says: 1 or 0 for each, `[rows, 1]`.
/// fn output(predicted: Tensor<2>, targets: Tensor<2>, mask: Tensor<2>) -> RegressionOutput {
///     let weight = f64::from(mask.clone().sum().into_scalar::<f32>());
///     let sum = ((predicted.clone() - targets.clone()).powf_scalar(2.0) * mask).sum();
///     RegressionOutput::new(mean_loss(sum, weight), predicted, targets)
/// }
/// ```
pub fn mean_loss(sum: Tensor<1>, weight: f64) -> Tensor<1> {
    let open = STEP.with_borrow_mut(|step| {
        let step = step.as_mut()?;
        step.has_sum = true;
        Some((step.schedule.clone(), step.accumulate))
    });
    let Some((schedule, accumulate)) = open else {
        return if weight == 0.0 { sum } else { sum.div_scalar(weight) };
    };
    let added = schedule.add_loss(Some(weight), accumulate).unwrap_or_else(|error| raise(error));
    sum.mul_scalar(added.factor.expect("a loss with a weight has a factor"))
}

/// The training step that runs on this thread, until the value is dropped.
pub(super) struct StepScope(());

impl StepScope {
    /// Begins the step of a model's module. `accumulate` says that another micro-batch follows.
    pub(super) fn begin(schedule: Arc<dyn ErasedSchedule>, accumulate: bool) -> Self {
        STEP.set(Some(OpenStep { schedule, accumulate, has_sum: false }));
        Self(())
    }

    /// Ends the step. Its loss was a mean if the module has not called [`mean_loss`].
    pub(super) fn end(self) -> Result<(), Error> {
        match STEP.take() {
            Some(OpenStep { schedule, accumulate, has_sum: false }) => {
                schedule.add_loss(None, accumulate).map(drop)
            }
            _ => Ok(()),
        }
    }
}

impl Drop for StepScope {
    fn drop(&mut self) {
        STEP.set(None);
    }
}
