//! Gradient clipping by the norm over all ranks.

use std::collections::HashSet;

use burn::module::{Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DispatchTensor, Tensor};

use super::model::Fsdp;
use crate::backend::Norm;
use crate::error::{Error, ScheduleError};
use crate::module::{FsdpModule, ParamIndex, ParamVisitor, Sharded};
use crate::param_group::Placement;
use crate::runtime::schedule::ErasedSchedule;

/// How [`Fsdp::clip_grad_norm_with`] clips gradients, as `torch.nn.utils.clip_grad_norm_` does.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct ClipOptions {
    max_norm: f64,
    norm: Norm,
    error_if_nonfinite: bool,
}

impl ClipOptions {
    /// Clips the 2-norm to `max_norm`, which is above 0, and accepts norms that are infinite or NaN.
    pub const fn new(max_norm: f64) -> Self {
        Self { max_norm, norm: Norm::Two, error_if_nonfinite: false }
    }

    /// Sets the norm. Default: [`Norm::Two`].
    pub const fn with_norm(mut self, norm: Norm) -> Self {
        self.norm = norm;
        self
    }

    /// Sets whether a norm that is infinite or NaN is an error, which names the first parameter with such
    /// a gradient. Default: `false`, as in PyTorch: the norm is returned, an infinite one scales finite
    /// gradients to 0, and NaN leaves them as they are.
    ///
    /// A step with a finite norm costs nothing more. Only after another one do ranks read the gradients
    /// again and exchange what they found.
    pub const fn with_error_if_nonfinite(mut self, error_if_nonfinite: bool) -> Self {
        self.error_if_nonfinite = error_if_nonfinite;
        self
    }
}

impl<M: FsdpModule> Fsdp<M> {
    /// Scales the gradients so that their 2-norm over all ranks and parameters is at most
    /// `max_norm`. Returns the norm before scaling. Every rank calls it.
    ///
    /// With a `max_norm` of [`f64::INFINITY`], the gradients do not change. Gradients of ignored
    /// parameters, which differ between ranks, are neither counted nor scaled.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`](crate::errors::CollectiveError) if another rank fails or does not take part
    /// within the time-out.
    pub fn clip_grad_norm(
        &self,
        gradients: &mut GradientsParams,
        max_norm: f64,
    ) -> Result<f64, Error> {
        self.clip_grad_norm_by(gradients, max_norm, Norm::Two)
    }

    /// Scales the gradients so that the given norm over all ranks and parameters is at most
    /// `max_norm`. Returns the norm before scaling. Every rank calls it.
    ///
    /// As `torch.nn.utils.clip_grad_norm_` does, it multiplies by `max_norm / (norm + 1e-6)` if
    /// this factor is below 1. It runs one all-reduce, of one number. Otherwise it works as
    /// [`clip_grad_norm`](Self::clip_grad_norm) does.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`](crate::errors::CollectiveError) if another rank fails or does not take part
    /// within the time-out.
    pub fn clip_grad_norm_by(
        &self,
        gradients: &mut GradientsParams,
        max_norm: f64,
        norm: Norm,
    ) -> Result<f64, Error> {
        self.clip_grad_norm_with(gradients, &ClipOptions::new(max_norm).with_norm(norm))
    }

    /// Scales the gradients as the options say. Returns the norm before scaling. Every rank calls it,
    /// with equal options.
    ///
    /// Otherwise it works as [`clip_grad_norm_by`](Self::clip_grad_norm_by) does.
    ///
    /// # Errors
    ///
    /// [`ScheduleError::NonFiniteNorm`] on every rank for a norm that is infinite or NaN, if the options
    /// ask for it. The gradients have not changed then. [`CollectiveError`](crate::errors::CollectiveError) if
    /// another rank fails or does not take part within the time-out.
    pub fn clip_grad_norm_with(
        &self,
        gradients: &mut GradientsParams,
        options: &ClipOptions,
    ) -> Result<f64, Error> {
        let ClipOptions { max_norm, norm, error_if_nonfinite } = *options;
        let norm = self.schedule.gradient_norm(self.read_gradients(gradients), norm)?;
        if error_if_nonfinite && !norm.is_finite() {
            return Err(self.non_finite(gradients, norm));
        }
        let factor = max_norm / (norm + 1e-6);
        if factor < 1.0 {
            let done = HashSet::new();
            self.module.visit_params(&mut ScaleGradients { gradients, factor, done });
        }
        Ok(norm)
    }

    /// Returns the gradients of sharded and replicated parameters.
    pub(super) fn read_gradients(
        &self,
        gradients: &GradientsParams,
    ) -> Vec<(ParamIndex, DispatchTensor)> {
        let mut read = ReadGradients { gradients, schedule: &*self.schedule, found: Vec::new() };
        self.module.visit_params(&mut read);
        read.found
    }

    /// Returns the error for a norm that is infinite or NaN.
    fn non_finite(&self, gradients: &GradientsParams, norm: f64) -> Error {
        let first = self.schedule.first_non_finite(self.read_gradients(gradients));
        first.map_or_else(Error::from, |first| {
            let path = |index| self.schedule.spec(index).path.clone();
            let first = first.map(|(index, rank)| (path(index), rank));
            ScheduleError::NonFiniteNorm { norm, first }.into()
        })
    }
}

/// Reads the gradients of sharded and replicated parameters, each weight once.
struct ReadGradients<'a> {
    gradients: &'a GradientsParams,
    schedule: &'a dyn ErasedSchedule,
    found: Vec<(ParamIndex, DispatchTensor)>,
}

impl ParamVisitor for ReadGradients<'_> {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(sharded) = Sharded::of(param) else { return };
        if is_alias(self.schedule, sharded) {
            return;
        }
        if let Some(gradient) = self.gradients.get::<D>(param.id) {
            self.found.push((sharded.index, gradient.into_dispatch()));
        }
    }
}

/// Returns whether a parameter is the alias of a tied weight. Alias and owner may have one id, and
/// so one gradient, which the owner counts.
fn is_alias(schedule: &dyn ErasedSchedule, sharded: &Sharded) -> bool {
    matches!(schedule.spec(sharded.index).placement, Placement::TiedTo(_))
}

/// Multiplies the gradients of sharded and replicated parameters by a factor.
struct ScaleGradients<'a> {
    gradients: &'a mut GradientsParams,
    factor: f64,
    /// Parameters that were scaled: the traversal reaches a tied weight several times.
    done: HashSet<ParamId>,
}

impl ParamVisitor for ScaleGradients<'_> {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if Sharded::of(param).is_some()
            && self.done.insert(param.id)
            && let Some(gradient) = self.gradients.remove::<D>(param.id)
        {
            self.gradients.register(param.id, gradient.mul_scalar(self.factor));
        }
    }
}
