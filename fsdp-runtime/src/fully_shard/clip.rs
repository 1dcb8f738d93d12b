//! Gradient clipping by the norm over all ranks.

use std::collections::HashSet;

use burn::module::{Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DispatchTensor, Tensor};

use super::model::Fsdp;
use crate::backend::Norm;
use crate::error::Error;
use crate::module::{FsdpModule, ParamIndex, ParamVisitor, Sharded};
use crate::param_group::Placement;
use crate::runtime::schedule::ErasedSchedule;

impl<M: FsdpModule> Fsdp<M> {
    /// Scales the gradients so that their 2-norm over all ranks and parameters is at most
    /// `max_norm`. Returns the norm before scaling. Every rank calls it.
    ///
    /// With a `max_norm` of [`f64::INFINITY`], the gradients do not change. Gradients of ignored
    /// parameters, which differ between ranks, are neither counted nor scaled.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`](crate::CollectiveError) if another rank fails or does not take part
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
    /// [`CollectiveError`](crate::CollectiveError) if another rank fails or does not take part
    /// within the time-out.
    pub fn clip_grad_norm_by(
        &self,
        gradients: &mut GradientsParams,
        max_norm: f64,
        norm: Norm,
    ) -> Result<f64, Error> {
        let mut read = ReadGradients { gradients, schedule: &*self.schedule, found: Vec::new() };
        self.module.visit_params(&mut read);
        let norm = self.schedule.gradient_norm(read.found, norm)?;
        let factor = max_norm / (norm + 1e-6);
        if factor < 1.0 {
            let done = HashSet::new();
            self.module.visit_params(&mut ScaleGradients { gradients, factor, done });
        }
        Ok(norm)
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
    let ParamIndex { unit, param: entry } = sharded.index;
    matches!(schedule.units()[unit].params[entry].placement, Placement::TiedTo(_))
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
