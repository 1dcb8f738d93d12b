//! Gradients of ignored parameters, which each rank has its own of.

use std::fmt;
use std::sync::{Arc, Mutex};

use burn::module::Param;
use burn::optim::GradientsParams;
use burn::tensor::{Gradients, Tensor};

use crate::module::Sharded;
use crate::module::{FsdpModule, ParamVisitor};

/// Gradients of ignored parameters that micro-batches have left, shared by clones of a model.
#[derive(Clone, Default)]
pub(crate) struct OwnGradients(Arc<Mutex<Option<GradientsParams>>>);

impl fmt::Debug for OwnGradients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OwnGradients")
    }
}

impl OwnGradients {
    pub(crate) fn put(&self, gradients: GradientsParams) {
        *self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(gradients);
    }

    fn take(&self) -> GradientsParams {
        let held = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        held.unwrap_or_default()
    }

    /// Adds the gradients of a module's ignored parameters to `sums`, with those of earlier
    /// micro-batches.
    pub(crate) fn add<M: FsdpModule>(
        &self,
        module: &M,
        from: &Gradients,
        sums: &mut GradientsParams,
    ) {
        let mut earlier = self.take();
        module.visit_params(&mut Ignored { from, earlier: &mut earlier, sums });
    }
}

/// Adds the gradients of parameters that are not managed to earlier ones.
struct Ignored<'a> {
    from: &'a Gradients,
    earlier: &'a mut GradientsParams,
    sums: &'a mut GradientsParams,
}

impl ParamVisitor for Ignored<'_> {
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
