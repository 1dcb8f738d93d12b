//! The hook that programs put on reduced gradients.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;

use crate::error::{Error, ScheduleError};
use crate::param_group::ParamSpec;

/// The parameter of a reduced gradient, for the hook of
/// [`Fsdp::set_gradient_hook`](crate::Fsdp::set_gradient_hook).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReducedGradient<'a> {
    /// Module path of the parameter.
    pub path: &'a str,
    /// Full shape of the parameter.
    pub shape: &'a [usize],
    /// Elements of the flattened parameter that this rank has: its shard, or all of them.
    pub range: Range<usize>,
}

/// A function that replaces a reduced gradient.
type Hook = dyn Fn(&ReducedGradient<'_>, Tensor<1>) -> Tensor<1> + Send + Sync;

/// The hook of a model on reduced gradients, if there is one.
#[derive(Clone, Default)]
pub(super) struct GradientHook(Option<Arc<Hook>>);

impl fmt::Debug for GradientHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GradientHook").field(&self.0.is_some()).finish()
    }
}

impl GradientHook {
    pub(super) fn new(
        hook: impl Fn(&ReducedGradient<'_>, Tensor<1>) -> Tensor<1> + Send + Sync + 'static,
    ) -> Self {
        Self(Some(Arc::new(hook)))
    }

    /// Returns the gradient that the hook makes of `gradient`, the reduced gradient of `param`.
    pub(super) fn apply<const D: usize>(
        &self,
        param: &ParamSpec,
        gradient: Tensor<D>,
    ) -> Result<Tensor<D>, Error> {
        let Some(hook) = &self.0 else { return Ok(gradient) };
        let (shape, expected) = (gradient.shape(), gradient.shape().num_elements());
        let of = ReducedGradient { path: &param.path, shape: &param.shape, range: param.range() };
        let replaced = hook(&of, gradient.reshape([expected]));
        let found = replaced.shape().num_elements();
        if found != expected {
            let path = param.path.clone();
            return Err(ScheduleError::HookedGradient { path, expected, found }.into());
        }
        Ok(replaced.reshape(shape))
    }
}
