//! Settings of a sharded model that may change between steps: when units are gathered and resharded,
//! how gradients are divided, and the hook on reduced gradients.

use burn::tensor::Tensor;

use super::gradient_hook::{GradientHook, ReducedGradient};
use super::model::Fsdp;
use super::unshard::UnitHandle;
use crate::error::Error;
use crate::module::FsdpModule;
use crate::options::{GradientAccumulation, ReshardAfterForward, divide_factor};
use crate::param_group::UnitControl;

impl<M: FsdpModule> Fsdp<M> {
    /// Sets whether gathered parameters of all units are freed between forward and backward, from the
    /// next forward on. Every rank calls it.
    ///
    /// The gather buffers are allocated anew, as
    /// [`FsdpOptions::with_reshard_after_forward`](crate::FsdpOptions::with_reshard_after_forward)
    /// says. Clones and snapshots of the model share the setting. FSDP2's `set_reshard_after_forward`.
    ///
    /// # Errors
    ///
    /// [`ScheduleError::ControlledDuringPass`](crate::errors::ScheduleError::ControlledDuringPass) between a
    /// forward and its backward,
    /// [`ShardError::InvalidOption`](crate::errors::ShardError::InvalidOption) for a `To` that does not divide
    /// the shard group, and [`CollectiveError`](crate::errors::CollectiveError) if a rank gives another value
    /// or does not take part within the time-out.
    pub fn set_reshard_after_forward(&self, reshard: ReshardAfterForward) -> Result<(), Error> {
        self.reshard_after_forward(None, reshard)
    }

    /// Sets whether gathered parameters of all units are freed after the backward of a micro-batch
    /// that [`accumulate`](Self::accumulate) ends. Every rank calls it.
    ///
    /// [`FsdpOptions::with_reshard_after_backward`](crate::FsdpOptions::with_reshard_after_backward)
    /// describes the setting and the gather buffers that it takes. FSDP2's
    /// `set_reshard_after_backward`.
    ///
    /// # Errors
    ///
    /// Those of [`set_reshard_after_forward`](Self::set_reshard_after_forward).
    pub fn set_reshard_after_backward(&self, reshard: bool) -> Result<(), Error> {
        self.reshard_after_backward(None, reshard)
    }

    /// Sets the number by which the sum of all ranks' gradients is divided, from the next backward
    /// on: the number of ranks for means, 1 for sums. Every rank calls it.
    ///
    /// [`FsdpOptions::with_gradient_divide_factor`](crate::FsdpOptions::with_gradient_divide_factor)
    /// sets it from the start. FSDP2's `set_gradient_divide_factor`.
    ///
    /// # Errors
    ///
    /// [`ShardError::InvalidOption`](crate::errors::ShardError::InvalidOption) for a number that is not
    /// positive and finite, and otherwise those of
    /// [`set_reshard_after_forward`](Self::set_reshard_after_forward).
    pub fn set_gradient_divide_factor(&self, factor: f64) -> Result<(), Error> {
        self.schedule.set_divide_factor(divide_factor(factor)?)
    }

    /// Sets how [`accumulate`](Self::accumulate) stores the gradients of a micro-batch, from the next
    /// backward on. Every rank calls it.
    ///
    /// It may change between two micro-batches of a step: what was accumulated before is reduced by
    /// the backward that ends the step at the latest. FSDP2's `set_requires_gradient_sync` and
    /// `set_requires_all_reduce`.
    ///
    /// # Errors
    ///
    /// Those of [`set_reshard_after_forward`](Self::set_reshard_after_forward).
    pub fn set_gradient_accumulation(
        &self,
        accumulation: GradientAccumulation,
    ) -> Result<(), Error> {
        self.schedule.set_accumulation(accumulation)
    }

    fn reshard_after_forward(
        &self,
        unit: Option<usize>,
        reshard: ReshardAfterForward,
    ) -> Result<(), Error> {
        let resolved = self.schedule.prepare_reshard(reshard)?;
        let what = format!("reshard_after_forward to {reshard:?}");
        self.change(unit, &what, |control| control.reshard = resolved)
    }

    fn reshard_after_backward(&self, unit: Option<usize>, reshard: bool) -> Result<(), Error> {
        let what = format!("reshard_after_backward to {reshard}");
        self.change(unit, &what, |control| control.reshard_after_backward = reshard)
    }

    /// Changes the settings of one unit, or of all.
    fn change(
        &self,
        unit: Option<usize>,
        what: &str,
        change: impl Fn(&mut UnitControl),
    ) -> Result<(), Error> {
        let of =
            unit.map_or("all units".into(), |unit| self.schedule.units()[unit].name.to_string());
        let what = format!("the change of {what} for {of}");
        self.schedule.change_controls(&what, &mut |controls| match unit {
            Some(unit) => change(&mut controls[unit]),
            None => controls.iter_mut().for_each(&change),
        })
    }
}

impl<M> Fsdp<M> {
    /// Sets the most bytes that the model may take on this rank's device, as
    /// [`Stats::memory`](crate::model::Stats::memory) counts them; `None`, the default, for no limit.
    ///
    /// Once they have exceeded the limit at any moment, the next forward or backward of a unit ends with
    /// [`ScheduleError::MemoryLimit`](crate::errors::ScheduleError::MemoryLimit), which names the largest
    /// holders. Activations that Burn's operations keep do not count. PyTorch's
    /// `torch.cuda.set_per_process_memory_fraction`, in bytes.
    pub fn set_memory_limit(&self, limit: Option<usize>) {
        self.schedule.set_memory_limit(limit);
    }

    /// Sets a function that is called with each reduced gradient and returns the gradient for the
    /// optimizer, in place of an earlier such function.
    ///
    /// It is called once a step, when [`backward`](Self::backward) or
    /// [`collect_gradients`](Self::collect_gradients) ends: after the reduction, after the gradients
    /// of all micro-batches are added up, and before clipping. Under a
    /// [`GradScaler`](crate::optim::GradScaler) gradients are still scaled then. The tensor has the elements
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
        self.gradient_hook = GradientHook::new(hook);
    }

    /// Removes the function of [`set_gradient_hook`](Self::set_gradient_hook).
    pub fn clear_gradient_hook(&mut self) {
        self.gradient_hook = GradientHook::default();
    }
}

impl<M: FsdpModule> UnitHandle<'_, M> {
    /// Sets whether gathered parameters of this unit are freed between forward and backward. Every
    /// rank calls it. [`Fsdp::set_reshard_after_forward`] describes the details and the errors.
    pub fn set_reshard_after_forward(&self, reshard: ReshardAfterForward) -> Result<(), Error> {
        self.model.reshard_after_forward(Some(self.index), reshard)
    }

    /// Sets whether gathered parameters of this unit are freed after the backward of a micro-batch.
    /// Every rank calls it. [`Fsdp::set_reshard_after_backward`] describes the details and the errors.
    pub fn set_reshard_after_backward(&self, reshard: bool) -> Result<(), Error> {
        self.model.reshard_after_backward(Some(self.index), reshard)
    }

    /// Sets the units, by module path, that are prefetched in forward while this unit computes.
    /// Every rank calls it.
    ///
    /// [`FsdpOptions::with_forward_prefetch_at`](crate::FsdpOptions::with_forward_prefetch_at)
    /// describes the list, and the gather buffers that are added for it. FSDP2's
    /// `set_modules_to_forward_prefetch`.
    ///
    /// # Errors
    ///
    /// [`ScheduleError::UnknownUnit`](crate::errors::ScheduleError::UnknownUnit), and those of
    /// [`Fsdp::set_reshard_after_forward`].
    pub fn set_forward_prefetch(&self, units: &[&str]) -> Result<(), Error> {
        let (what, units) = self.prefetched("forward_prefetch", units)?;
        let change = |control: &mut UnitControl| control.forward_prefetch = Some(units.clone());
        self.model.change(Some(self.index), &what, change)
    }

    /// Sets the units, by module path, that are prefetched in backward while this unit computes.
    /// Every rank calls it. [`set_forward_prefetch`](Self::set_forward_prefetch) describes the
    /// details and the errors. FSDP2's `set_modules_to_backward_prefetch`.
    pub fn set_backward_prefetch(&self, units: &[&str]) -> Result<(), Error> {
        let (what, units) = self.prefetched("backward_prefetch", units)?;
        let change = |control: &mut UnitControl| control.backward_prefetch = Some(units.clone());
        self.model.change(Some(self.index), &what, change)
    }

    /// Removes the list of units that are prefetched in forward while this unit computes: the units
    /// that come next are prefetched again, as [`FsdpOptions::with_forward_prefetch`] and
    /// [`FsdpOptions::with_units_ahead`] say. Every rank calls it.
    ///
    /// A list from the options is removed, too. The gather buffers that were added for the list are
    /// freed. The errors are those of [`Fsdp::set_reshard_after_forward`].
    ///
    /// [`FsdpOptions::with_forward_prefetch`]: crate::FsdpOptions::with_forward_prefetch
    /// [`FsdpOptions::with_units_ahead`]: crate::FsdpOptions::with_units_ahead
    pub fn clear_forward_prefetch(&self) -> Result<(), Error> {
        let what = "forward_prefetch to the next units";
        self.model.change(Some(self.index), what, |control| control.forward_prefetch = None)
    }

    /// Removes the list of units that are prefetched in backward while this unit computes. Every rank
    /// calls it. [`clear_forward_prefetch`](Self::clear_forward_prefetch) describes the details.
    pub fn clear_backward_prefetch(&self) -> Result<(), Error> {
        let what = "backward_prefetch to the previous units";
        self.model.change(Some(self.index), what, |control| control.backward_prefetch = None)
    }

    /// Returns the description of a list of units to prefetch, and the units.
    fn prefetched(&self, option: &str, units: &[&str]) -> Result<(String, Vec<usize>), Error> {
        let find = |path: &&str| Ok::<_, Error>(self.model.unit(path)?.index);
        let found = units.iter().map(find).collect::<Result<_, _>>()?;
        Ok((format!("{option} to {units:?}"), found))
    }
}
