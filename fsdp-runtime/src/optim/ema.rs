//! The exponential moving average of a sharded model's parameters, shard by shard.

use std::collections::{HashMap, HashSet};
use std::ops::Deref;

use burn::module::{ModuleMapper, Param, ParamId};
use burn::tensor::{DispatchTensor, Tensor};

use crate::error::Error;
use crate::fully_shard::Fsdp;
use crate::module::{FsdpModule, ParamVisitor, Sharded};
use crate::param_group::memory::Counted;

/// The exponential moving average of a model's parameters: `average = decay * average + (1 - decay)
/// * parameter` after each step. PyTorch's `AveragedModel` with `get_ema_multi_avg_fn(decay)`.
///
/// Each rank averages its own shards, so that no collective runs, and the average takes as much
/// memory as the shards of trainable parameters ([`Memory::averages`](crate::memory::Memory::averages)).
/// Frozen parameters, running statistics and ignored parameters are those of the model at the last
/// update.
///
/// ```no_run
/// use burn::optim::ModuleOptimizer;
/// use burn::tensor::Tensor;
/// use fsdp_runtime::checkpoint::Checkpoint;
/// use fsdp_runtime::optim::Ema;
/// use fsdp_runtime::prelude::*;
///
/// fn train<M: FsdpModule>(
///     mut model: Fsdp<M>,
///     mut optimizer: ModuleOptimizer,
///     loss: impl Fn(&Fsdp<M>) -> Tensor<1>,
/// ) -> Result<(), Error> {
///     let mut average = Ema::new(0.999).of(&model);
///     for step in 1..=1000 {
///         let gradients = model.backward(loss(&model))?;
///         model = optimizer.step(1e-3, model, gradients);
///         average.update(&model);
///         if step % 100 == 0 {
///             let averaged = average.swap_in(&mut model)?;
///             println!("{}", loss(&averaged.valid()).into_scalar::<f32>());
///         }
///     }
///     let checkpoint =
///         Checkpoint::new(1000).with_model("net", &model).with_average("average", &average);
///     Ok(())
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct Ema {
    decay: f64,
}

impl Ema {
    /// Returns the settings of an average with a decay per update.
    ///
    /// # Panics
    ///
    /// Panics for a decay outside of `0.0..=1.0`.
    pub fn new(decay: f64) -> Self {
        assert!((0.0..=1.0).contains(&decay), "the decay {decay} is not in 0.0..=1.0");
        Self { decay }
    }

    /// Returns an average that begins with the present parameters of `model`.
    pub fn of<M: FsdpModule>(self, model: &Fsdp<M>) -> EmaModel<M> {
        let mut average = Average::new(self.decay, model, HashMap::new());
        let model = model.with_module(model.module.clone().map(&mut average));
        let counted = model.schedule.count_average(average.bytes);
        EmaModel { decay: self.decay, model, bytes: average.bytes, _counted: counted }
    }
}

/// An exponential moving average, which [`Ema::of`] returns.
#[derive(Debug)]
pub struct EmaModel<M> {
    decay: f64,
    /// The model with the averages in the place of its trainable parameters.
    pub(crate) model: Fsdp<M>,
    /// Size of the averages on this rank.
    bytes: usize,
    _counted: Counted,
}

impl<M: FsdpModule> EmaModel<M> {
    /// Updates the average with the parameters of `model`, which is the one that the average was
    /// made of. Call it after each step of the optimizer.
    pub fn update(&mut self, model: &Fsdp<M>) {
        let mut values = Values::default();
        self.model.module.visit_params(&mut values);
        // The averages are in `values` alone, so that they are updated in place.
        self.model.module = model.module.clone();
        let mut average = Average::new(self.decay, model, values.trained);
        self.model.module = model.module.clone().map(&mut average);
        if average.bytes != self.bytes {
            // A parameter has been unfrozen since.
            self.bytes = average.bytes;
            self._counted = self.model.schedule.count_average(self.bytes);
        }
    }

    /// Swaps the average into `model` until the guard is dropped, for evaluation. The guard is the
    /// model; `guard.valid()` evaluates it.
    ///
    /// # Errors
    ///
    /// [`ScheduleError::ChangedWhileUnsharded`](crate::errors::ScheduleError::ChangedWhileUnsharded) while a
    /// unit is kept gathered.
    pub fn swap_in<'a>(&'a mut self, model: &'a mut Fsdp<M>) -> Result<SwappedIn<'a, M>, Error> {
        model.schedule.begin_change()?;
        std::mem::swap(&mut self.model.module, &mut model.module);
        Ok(SwappedIn { model, average: self })
    }
}

/// A model with the average of its parameters in their place, which [`EmaModel::swap_in`] returns.
/// Dropping it puts the parameters back.
#[derive(Debug)]
#[must_use]
pub struct SwappedIn<'a, M> {
    model: &'a mut Fsdp<M>,
    average: &'a mut EmaModel<M>,
}

impl<M> Deref for SwappedIn<'_, M> {
    type Target = Fsdp<M>;

    fn deref(&self) -> &Fsdp<M> {
        self.model
    }
}

impl<M> Drop for SwappedIn<'_, M> {
    fn drop(&mut self) {
        // A unit that a clone keeps gathered still has the averages.
        let _ = self.model.schedule.begin_change();
        std::mem::swap(&mut self.average.model.module, &mut self.model.module);
    }
}

/// Collects the sharded and replicated parameters of a model.
///
/// A tied parameter may have the id of its owner, which comes first here and in a map.
#[derive(Default)]
struct Values {
    /// All of them.
    ids: HashSet<ParamId>,
    /// Values of those that are trained.
    trained: HashMap<ParamId, DispatchTensor>,
}

impl ParamVisitor for Values {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if Sharded::of(param).is_none() || !self.ids.insert(param.id) {
            return;
        }
        let base = param.base();
        if base.is_require_grad() {
            self.trained.insert(param.id, base.detach().into_dispatch());
        }
    }
}

/// Replaces the trained parameters of a model by their averages.
struct Average {
    decay: f64,
    /// Sharded and replicated parameters that were not replaced yet.
    ids: HashSet<ParamId>,
    /// Averages so far.
    values: HashMap<ParamId, DispatchTensor>,
    /// Size of the averages.
    bytes: usize,
}

impl Average {
    fn new<M: FsdpModule>(
        decay: f64,
        model: &Fsdp<M>,
        values: HashMap<ParamId, DispatchTensor>,
    ) -> Self {
        let mut found = Values::default();
        model.module.visit_params(&mut found);
        Self { decay, ids: found.ids, values, bytes: 0 }
    }
}

impl ModuleMapper for Average {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.ids.remove(&param.id) {
            return param;
        }
        let (id, base, mapper) = param.consume();
        let held = self.values.remove(&id).map(Tensor::<D>::from_dispatch);
        if held.is_none() && !base.is_require_grad() {
            return Param::from_mapped_value(id, base, mapper);
        }
        let mut present = base.detach();
        let average = match held {
            Some(average) => {
                if present.device() != average.device() {
                    // The parameters of a model without autodiff.
                    let target = (&average.device(), present.dtype());
                    present = Tensor::from_data(present.into_data(), target);
                }
                average.mul_scalar(self.decay).add(present.mul_scalar(1.0 - self.decay))
            }
            // A copy: an average that shared the parameter's memory would keep the optimizer from
            // updating it in place.
            None => present.mul_scalar(1.0),
        };
        self.bytes += average.shape().num_elements() * average.dtype().size();
        Param::from_mapped_value(id, average.detach().set_require_grad(true), mapper)
    }
}
