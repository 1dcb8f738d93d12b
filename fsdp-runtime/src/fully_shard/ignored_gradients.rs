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
    /// of earlier micro-batches.
    pub(super) fn add<M: FsdpModule>(
        &self,
        module: &M,
        from: &Gradients,
        sums: &mut GradientsParams,
    ) {
        let mut earlier = self.take();
        module.visit_params(&mut AddGradients { from, earlier: &mut earlier, sums });
    }
}

/// Adds the gradients of ignored parameters to those of earlier micro-batches.
struct AddGradients<'a> {
    from: &'a Gradients,
    earlier: &'a mut GradientsParams,
    sums: &'a mut GradientsParams,
}

impl ParamVisitor for AddGradients<'_> {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if Sharded::of(param).is_some() || !param.is_initialized() {
            return;
        }
        let gradient = param.base().grad(self.from);
        let sum = match (self.earlier.remove::<D>(param.id), gradient) {
            (Some(earlier), Some(gradient)) => Some(earlier + gradient),
            (earlier, gradient) => earlier.or(gradient),
        };
        if let Some(sum) = sum {
            self.sums.register(param.id, sum);
        }
    }
}
