//! The backward pass of losses that are sums over counted tokens.

use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use super::model::Fsdp;
use crate::error::Error;
use crate::module::FsdpModule;

impl<M: FsdpModule> Fsdp<M> {
    /// Backpropagates `sum`, the sum of this rank's losses, and returns the gradients of the mean for the
    /// optimizer. Every rank calls it.
    ///
    /// `sum` has one element. `weight` is the number of losses in it, such as of tokens that are no padding.
    /// The gradients are those of the sum over all ranks, and over the micro-batches of
    /// [`accumulate_sum`](Self::accumulate_sum), divided by the sum of all weights:
    ///
    /// `(sum_0 + sum_1 + ..) / (weight_0 + weight_1 + ..)`
    ///
    /// [`backward`](Self::backward) averages the ranks' means in place of this, so that a token on a rank
    /// with few tokens weighs more. Both have the same gradients where all weights are equal. PyTorch users
    /// multiply the loss by the number of ranks and divide it by the number of all tokens.
    ///
    /// - Ranks exchange their weights before the first backward of a step, and before the last.
    /// - A rank whose weight is 0 runs its forward and passes a sum with a graph, such as
    ///   `(losses * mask).sum()` with a mask of zeros.
    /// - A [`GradScaler`](crate::optim::GradScaler) scales `sum`, and not the weight.
    /// - [`FsdpOptions::with_gradient_divide_factor`](crate::FsdpOptions::with_gradient_divide_factor) has no
    ///   effect on these gradients.
    /// - Gradients of ignored parameters are those of this rank's `sum`, not reduced, multiplied by the
    ///   number of ranks and divided by the sum of all weights.
    ///
    /// # Errors
    ///
    /// - [`ScheduleError::NoWeight`](crate::errors::ScheduleError::NoWeight) on every rank if all weights of the
    ///   step are 0. Parameters and gradients of earlier micro-batches are as before.
    /// - [`ScheduleError::InvalidWeight`](crate::errors::ScheduleError::InvalidWeight) for a weight that is
    ///   negative, infinite or NaN, and on every rank for a sum of weights whose reciprocal f32 does not
    ///   have.
    /// - [`ScheduleError::MixedLosses`](crate::errors::ScheduleError::MixedLosses) if an earlier micro-batch
    ///   of the step has called [`accumulate`](Self::accumulate).
    /// - The errors of [`backward`](Self::backward).
    ///
    /// # Example
    ///
    /// ```no_run
    /// use burn::optim::GradientsParams;
    /// use burn::tensor::{Int, Tensor, activation::log_softmax};
    /// use fsdp_runtime::prelude::*;
    ///
    /// /// The label of a position that is not counted.
    /// const IGNORED: i32 = -100;
    ///
    /// /// Returns the gradients of the mean over all ranks' tokens, and that mean.
    /// ///
    /// /// - logits: `[tokens, classes]`
    /// /// - labels: `[tokens]`
    /// fn gradients<M: FsdpModule>(
    ///     model: &Fsdp<M>,
    ///     logits: Tensor<2>,
    ///     labels: Tensor<1, Int>,
    ///     worker: &Worker,
    /// ) -> Result<(GradientsParams, f64), Error> {
    ///     let counted = labels.clone().not_equal_elem(IGNORED);
    ///     let tokens = f64::from(counted.clone().int().sum().into_scalar::<i32>());
    ///     let index = labels.clamp_min(0).unsqueeze_dim(1);
    ///     let losses = log_softmax(logits, 1).gather(1, index).squeeze_dim::<1>(1).neg();
    ///     let sum = losses.mask_fill(counted.bool_not(), 0.0).sum();
    ///     let mut mean = [f64::from(sum.clone().into_scalar::<f32>()), tokens];
    ///     let gradients = model.backward_sum(sum, tokens)?;
    ///     worker.all_reduce_sum(&mut mean)?;
    ///     Ok((gradients, mean[0] / mean[1]))
    /// }
    /// ```
    pub fn backward_sum(&self, sum: Tensor<1>, weight: f64) -> Result<GradientsParams, Error> {
        self.end_step_with(sum, Some(weight))
    }

    /// Backpropagates the sum of a micro-batch's losses and keeps the gradients. Every rank calls it.
    ///
    /// The [`backward_sum`](Self::backward_sum) that ends the step divides by the weights of all
    /// micro-batches. So, other than for [`accumulate`](Self::accumulate), no loss is divided by the number
    /// of micro-batches. A weight of 0 is allowed, also on every rank.
    ///
    /// # Errors
    ///
    /// The errors of [`backward_sum`](Self::backward_sum), except for
    /// [`ScheduleError::NoWeight`](crate::errors::ScheduleError::NoWeight).
    pub fn accumulate_sum(&self, sum: Tensor<1>, weight: f64) -> Result<(), Error> {
        self.continue_step_with(sum, Some(weight))
    }
}
