//! Gradients of ignored parameters, which each rank has separately.

use std::fmt;
use std::sync::{Arc, Mutex};

use burn::module::Param;
use burn::optim::GradientsParams;
use burn::tensor::{Gradients, Tensor};

use crate::error::IgnorePoison;
use crate::module::{FsdpModule, ParamVisitor, Sharded};

/// The gradients of ignored parameters from earlier micro-batches of a step. Clones of a model
/// share them.
#[derive(Clone, Default)]
pub(super) struct IgnoredGradients(Arc<Mutex<Option<GradientsParams>>>);

impl fmt::Debug for IgnoredGradients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IgnoredGradients")
    }
}

impl IgnoredGradients {
    /// Keeps gradients until the next micro-batch.
    pub(super) fn keep(&self, gradients: GradientsParams) {
        *self.0.lock().ignore_poison() = Some(gradients);
    }

    fn take(&self) -> GradientsParams {
        let kept = self.0.lock().ignore_poison().take();
        kept.unwrap_or_default()
    }

    /// Adds to `sums` the gradients of the module's ignored parameters: those in `from`, and those
    /// of earlier micro-batches. They are multiplied by `factor`, if there is one.
    pub(super) fn add<M: FsdpModule>(
        &self,
        module: &M,
        from: &mut impl OwnGradients,
        sums: &mut GradientsParams,
        factor: Option<f64>,
    ) {
        let mut earlier = self.take();
        module.visit_params(&mut AddGradients { from, earlier: &mut earlier, sums, factor });
    }
}

/// Returns a gradient multiplied by `factor`, if there is one.
pub(super) fn scaled<const D: usize>(gradient: Tensor<D>, factor: Option<f64>) -> Tensor<D> {
    match factor {
        Some(factor) => gradient.mul_scalar(factor),
        None => gradient,
    }
}

/// Gradients of one backward pass.
pub(super) trait OwnGradients {
    /// Returns the gradient of a parameter.
    fn of<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Tensor<D>>;
}

impl OwnGradients for Gradients {
    fn of<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Tensor<D>> {
        param.base().grad(self)
    }
}

impl OwnGradients for GradientsParams {
    fn of<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Tensor<D>> {
        self.remove(param.id)
    }
}

/// Adds the gradients of ignored parameters to those of earlier micro-batches.
struct AddGradients<'a, G> {
    from: &'a mut G,
    earlier: &'a mut GradientsParams,
    sums: &'a mut GradientsParams,
    factor: Option<f64>,
}

impl<G: OwnGradients> ParamVisitor for AddGradients<'_, G> {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if Sharded::of(param).is_some() || !param.is_initialized() {
            return;
        }
        let gradient = self.from.of(param);
        let sum = match (self.earlier.remove::<D>(param.id), gradient) {
            (Some(earlier), Some(gradient)) => Some(earlier + gradient),
            (earlier, gradient) => earlier.or(gradient),
        };
        if let Some(sum) = sum {
            self.sums.register(param.id, scaled(sum, self.factor));
        }
    }
}
