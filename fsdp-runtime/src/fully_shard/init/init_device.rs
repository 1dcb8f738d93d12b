//! The device that a model is initialised for, and tensors on it.

use burn::module::Param;
use burn::tensor::{Device, DispatchTensor, Tensor};

use super::param_value::{EmptyParam, filled, filled_base};
use crate::backend::{
    AutodiffContext, FloatTensor, ModelBackend, Raw, RawFloat, StorageDevice, StoredTensor,
};
use crate::param_group::ParamSpec;

/// The device that computes, and the storage device of the parameters.
pub(in crate::fully_shard) struct InitDevice<B: ModelBackend> {
    /// Burn's name of the device that computes.
    pub(super) compute: Device,
    /// The backend's name of the device that computes.
    pub(super) backend: B::Device,
    /// Storage device of the parameters.
    pub(super) storage: StorageDevice,
    /// Autodiff context of tensors on the device; `None` for a device without autodiff.
    pub(super) context: Option<AutodiffContext>,
}

impl<B: ModelBackend> InitDevice<B> {
    /// Creates the description of a device from its two forms and from the storage device.
    pub(in crate::fully_shard) fn new(
        compute: &Device,
        backend: B::Device,
        storage: StorageDevice,
    ) -> Self {
        let probe = Tensor::<1>::zeros([1], compute).into_dispatch();
        let context = match B::from_dispatch(probe) {
            Some(FloatTensor::Autodiff(_, context)) => Some(context),
            _ => None,
        };
        Self { compute: compute.clone(), backend, storage, context }
    }

    /// Returns an f32 tensor on the device, filled with one value.
    pub(super) fn filled(&self, shape: &[usize], value: f32) -> RawFloat<B> {
        filled::<Raw<B>>(shape, value, &self.backend)
    }

    /// Returns the tensor that this rank stores for a parameter, filled with one value.
    pub(super) fn filled_base(&self, spec: &ParamSpec, value: f32) -> RawFloat<B> {
        filled_base::<Raw<B>>(spec, value, &self.backend)
    }

    /// Returns a Burn tensor on the storage device, with the model's autodiff context.
    pub(super) fn tensor<const D: usize>(&self, value: RawFloat<B>) -> Tensor<D> {
        Tensor::from_dispatch(self.stored(StoredTensor::<Raw<B>>::store(value, self.storage)))
    }

    /// Returns a stored tensor as Burn's, with the model's autodiff context.
    pub(super) fn stored(&self, value: StoredTensor<Raw<B>>) -> DispatchTensor {
        StoredTensor::<B>::raise(value).with_context(self.context)
    }

    /// Takes a parameter apart without initialising its value.
    pub(super) fn empty<const D: usize>(&self, param: Param<Tensor<D>>) -> EmptyParam<D> {
        let id = param.id;
        // A tensor that is loaded into a parameter takes over the parameter's settings.
        let placeholder = self.tensor(self.filled(&[1; D], 0.0));
        let (id, placeholder, mapper) = param.transform_for_load(placeholder, id).consume();
        EmptyParam { id, requires_grad: placeholder.is_require_grad(), mapper }
    }
}
