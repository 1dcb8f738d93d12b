//! Takes the model and the optimizer out of Burn's `Learner`, whose fields are private.
//!
//! `Learner::optimizer_step` keeps a clone of the model while the optimizer steps, so that no shard
//! could be updated in place. So it is called once, before the training, in a mode in which
//! [`Fsdp`]'s `optimize` keeps the model and the optimizer that it gets, and returns a model of
//! one-element parameters. From then on the learner gives the learning rates only.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::mem;

use burn::module::{ModuleMapper, Param};
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Bool, Int, Tensor};
use burn::train::{InferenceStep, Learner, TrainStep};

use crate::fully_shard::Fsdp;
use crate::module::FsdpModule;

thread_local! {
    static ARMED: Cell<bool> = const { Cell::new(false) };
    static TAKEN: RefCell<Option<Box<dyn Any>>> = const { RefCell::new(None) };
}

/// Takes the model and the optimizer of a learner.
pub(super) fn take<M>(learner: &mut Learner<Fsdp<M>>) -> (Fsdp<M>, ModuleOptimizer)
where
    M: FsdpModule + TrainStep + InferenceStep + 'static,
{
    ARMED.set(true);
    learner.optimizer_step(GradientsParams::new());
    let taken = TAKEN.take().expect("`optimize` of the armed thread was called");
    *taken.downcast().expect("`optimize` was called on the learner's model")
}

/// Returns whether this call of `optimize` comes from [`take`], once.
pub(super) fn is_armed() -> bool {
    ARMED.replace(false)
}

/// Keeps the model and the optimizer for [`take`], and returns a model without weights.
pub(super) fn give<M>(model: Fsdp<M>, optimizer: &mut ModuleOptimizer) -> Fsdp<M>
where
    M: FsdpModule + 'static,
{
    let hollow = model.clone().map_module(|module| module.map(&mut Hollow));
    let optimizer = mem::replace(optimizer, SgdConfig::new().init());
    TAKEN.replace(Some(Box::new((model, optimizer))));
    hollow
}

/// Replaces every parameter by one element.
struct Hollow;

macro_rules! hollow {
    ($($name:ident: $kind:ty),+) => {$(
        fn $name<const D: usize>(&mut self, param: Param<Tensor<D, $kind>>) -> Param<Tensor<D, $kind>> {
            if !param.is_initialized() {
                return param;
            }
            let device = param.lazy_device();
            let (id, _, mapper) = param.consume();
            Param::from_mapped_value(id, Tensor::empty([1; D], &device), mapper)
        }
    )+};
}

impl ModuleMapper for Hollow {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.is_initialized() {
            return param;
        }
        let device = param.lazy_device();
        let (id, _, mapper) = param.consume();
        Param::from_mapped_value(id, Tensor::empty([1; D], &device), mapper)
    }

    hollow!(map_int: Int, map_bool: Bool);
}
