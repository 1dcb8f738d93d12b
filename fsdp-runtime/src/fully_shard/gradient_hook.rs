//! The hook that programs put on reduced gradients.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;

use super::model::Fsdp;
use crate::error::{Error, ScheduleError};
use crate::param_group::ParamSpec;

/// The parameter of a reduced gradient, for the hook of [`Fsdp::set_gradient_hook`].
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

impl<M> Fsdp<M> {
    /// Sets a function that is called with each reduced gradient and returns the gradient for the
    /// optimizer, in place of an earlier such function.
    ///
    /// It is called once a step, when [`backward`](Self::backward) or
    /// [`collect_gradients`](Self::collect_gradients) ends: after the reduction, after the gradients
    /// of all micro-batches are added up, and before clipping. Under a
    /// [`GradScaler`](crate::GradScaler) gradients are still scaled then. The tensor has the elements
    /// that this rank owns, flattened, and the function returns as many. Ranks call it for different
    /// parameters, because a rank has no gradient of a parameter whose shard is empty; so it must not
    /// run collectives. Gradients of ignored parameters are left out.
    ///
    /// Clones that are made later have the function, too. FSDP2's `set_all_reduce_hook`.
    ///
    /// # Example
    ///
    /// ```no_run
    /// # use burn::module::Module;
    /// # use burn::nn::Linear;
    /// # use burn::tensor::Tensor;
    /// # use fsdp_runtime::prelude::*;
    /// # #[derive(Module, Debug)]
    /// # #[fsdp_unit(root)]
    /// # struct Net { head: Linear }
    /// # #[fsdp_unit]
    /// # impl Net {
    /// #     fn forward(&self, x: Tensor<2>) -> Tensor<2> { self.head.forward(x) }
    /// # }
    /// # fn example(mut model: Fsdp<Net>) {
    /// // The embedding learns at a tenth of the rate.
    /// model.set_gradient_hook(|of, gradient| match of.path {
    ///     "embed.weight" => gradient * 0.1,
    ///     _ => gradient,
    /// });
    /// # }
    /// ```
    pub fn set_gradient_hook(
        &mut self,
        hook: impl Fn(&ReducedGradient<'_>, Tensor<1>) -> Tensor<1> + Send + Sync + 'static,
    ) {
        self.gradient_hook = GradientHook(Some(Arc::new(hook)));
    }

    /// Removes the function of [`set_gradient_hook`](Self::set_gradient_hook).
    pub fn clear_gradient_hook(&mut self) {
        self.gradient_hook = GradientHook::default();
    }
}
