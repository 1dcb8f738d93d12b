//! Scaling of gradients.

use std::collections::HashSet;

use burn::module::{Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use crate::module::{FsdpModule, ParamVisitor, Sharded};

/// Multiplies the gradients of a module's sharded and replicated parameters by `factor`.
pub(crate) fn scale_gradients<M: FsdpModule>(
    module: &M,
    gradients: &mut GradientsParams,
    factor: f64,
) {
    struct Scale<'a> {
        gradients: &'a mut GradientsParams,
        factor: f64,
        /// A tied parameter stands at several places.
        done: HashSet<ParamId>,
    }
    impl ParamVisitor for Scale<'_> {
        fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if Sharded::of(param).is_some()
                && self.done.insert(param.id)
                && let Some(gradient) = self.gradients.remove::<D>(param.id)
            {
                self.gradients.register(param.id, gradient.mul_scalar(self.factor));
            }
        }
    }
    module.visit_params(&mut Scale { gradients, factor, done: HashSet::new() });
}
