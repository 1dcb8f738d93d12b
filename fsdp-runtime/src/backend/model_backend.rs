//! [`ModelBackend`]: the backend of a model's tensors, as Burn dispatches them, and the conversion
//! to the backend of their buffers.
//!
//! On Flex the two are the same. On CubeCL devices Burn's feature `fusion` puts
//! [`Fusion`](burn_fusion::Fusion) around Burn's CubeCL backend. Any crate of a build may turn the
//! feature on. Operations are then recorded in a queue, one for each thread, and launched later,
//! several in one kernel. A tensor is the name of a result that may not exist yet.
//!
//! The runtime treats both cases alike:
//!
//! - Everything that the user's code sees is a tensor of the [`ModelBackend`]: parameters, inputs,
//!   outputs, gradients.
//! - Gather buffers, collectives and kernels work on buffers, which are tensors of its
//!   [`Raw`](ModelBackend::Raw) backend. The communication thread never sees another kind, and so
//!   never records an operation.
//! - [`lower`](ModelBackend::lower) leads from tensors to buffers, and
//!   [`raise`](ModelBackend::raise) back. Lowering launches the queue, so the runtime lowers all
//!   tensors of a unit at once.
//! - [`defer`](ModelBackend::defer) runs a kernel on buffers as an operation of the queue, without
//!   lowering.
//! - [`drain`](ModelBackend::drain) launches the queue, so that recorded reads of a gather buffer
//!   run before it is rewritten.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Autodiff, Backend, TensorMetadata};
use burn::tensor::{DType, DispatchTensor, Shape};
use fsdp_kernels::{Float, Kernels, Tracked, cast, takes};

use super::shard_backend::ShardBackend;
use crate::error::ShardError;

/// Backend of the buffers of backend `B`.
pub(crate) type Raw<B> = <B as ModelBackend>::Raw;
/// Buffer of backend `B`: a float tensor whose elements exist or are being computed.
pub(crate) type RawFloat<B> = Float<Raw<B>>;

/// Float tensor of backend `B`, taken out of Burn's [`DispatchTensor`].
pub(crate) enum FloatTensor<B: Backend> {
    /// Tensor of a device without autodiff.
    Plain(Float<B>),
    /// Tensor of an autodiff device, tracked or not.
    Autodiff(Tracked<B>, AutodiffContext),
}

/// Autodiff context of a [`DispatchTensor`], which names Burn's own checkpointing strategy. A
/// tensor that is put back into a [`DispatchTensor`] gets the context it came with.
pub(crate) type AutodiffContext = burn::backend::DispatchAutodiffContext;

impl<B: ModelBackend> FloatTensor<B> {
    /// Returns the type of the elements.
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::Plain(tensor) => tensor.dtype(),
            Self::Autodiff(tensor, _) => tensor.dtype(),
        }
    }

    /// Returns the tensor cast to `dtype`, if there is one. On an autodiff device the cast is
    /// recorded.
    pub(crate) fn cast(self, dtype: Option<DType>) -> Self {
        match (self, dtype) {
            (Self::Plain(tensor), Some(dtype)) => Self::Plain(cast_model::<B>(tensor, dtype)),
            (Self::Autodiff(tensor, context), Some(dtype)) if tensor.dtype() != dtype => {
                let tensor = Autodiff::<B>::float_cast(tensor, dtype.into());
                Self::Autodiff(tensor, context)
            }
            (value, _) => value,
        }
    }

    /// Returns the tensor without its autodiff node.
    pub(crate) fn into_inner(self) -> Float<B> {
        match self {
            Self::Plain(tensor) => tensor,
            Self::Autodiff(tensor, _) => tensor.into_primitive(),
        }
    }
}

/// Backend of a model's tensors.
///
/// A method that launches operations launches those that the calling thread has recorded, on the
/// calling thread's stream.
pub(crate) trait ModelBackend: Backend {
    /// Backend of the tensors' buffers.
    type Raw: ShardBackend<Device = Self::Device>;
    /// Whether operations are recorded and launched later.
    const RECORDS: bool;

    /// Takes a float tensor of this backend out of Burn's dispatch type. Returns `None` for tensors
    /// of another backend or kind.
    fn from_dispatch(tensor: DispatchTensor) -> Option<FloatTensor<Self>>;
    /// Puts a float tensor of this backend into Burn's dispatch type.
    fn into_dispatch(value: FloatTensor<Self>) -> DispatchTensor;

    /// Returns the buffers of tensors. The operations that write them are launched.
    fn lower(tensors: Vec<Float<Self>>) -> Vec<RawFloat<Self>>;
    /// Returns the tensor of a buffer.
    fn raise(buffer: RawFloat<Self>) -> Float<Self>;
    /// Launches the recorded operations.
    fn drain(device: &Self::Device);
    /// Returns the results of `f` on the buffers of `inputs`, given by shape and dtype. `f` runs
    /// after the recorded operations before it, or at once if no operations are recorded.
    fn defer(
        inputs: Vec<Float<Self>>,
        outputs: Vec<(Shape, DType)>,
        f: impl FnOnce(Vec<RawFloat<Self>>) -> Vec<RawFloat<Self>> + Send + 'static,
    ) -> Vec<Float<Self>>;

    /// Returns the result of `f` on the buffer of one tensor, as [`defer`](Self::defer) does. The
    /// result has the tensor's shape.
    fn defer_one(
        tensor: Float<Self>,
        dtype: DType,
        f: impl FnOnce(RawFloat<Self>) -> RawFloat<Self> + Send + 'static,
    ) -> Float<Self> {
        let output = (tensor.shape(), dtype);
        let f = |buffers: Vec<_>| buffers.into_iter().next().map(f).into_iter().collect();
        let mut outputs = Self::defer(vec![tensor], vec![output], f);
        outputs.pop().expect("`defer` returns one tensor for each output")
    }
}

/// Returns the tensor cast to `dtype`, or itself if it has that dtype. Nothing is lowered.
pub(crate) fn cast_model<B: ModelBackend>(tensor: Float<B>, dtype: DType) -> Float<B> {
    match tensor.dtype() {
        found if found == dtype => tensor,
        found if takes(found) && takes(dtype) => {
            B::defer_one(tensor, dtype, move |buffer| cast::<B::Raw>(buffer, dtype))
        }
        _ => B::float_cast(tensor, dtype.into()),
    }
}

/// Returns tensors cast to `dtype`, in order, as one operation that shares kernel launches. The
/// tensors have dtypes that the kernels take. Nothing is lowered.
pub(crate) fn cast_all_model<B: ModelBackend>(
    tensors: Vec<Float<B>>,
    dtype: DType,
) -> Vec<Float<B>> {
    let outputs = tensors.iter().map(|tensor| (tensor.shape(), dtype)).collect();
    B::defer(tensors, outputs, move |buffers| Raw::<B>::cast_all(buffers, dtype))
}

/// Evaluates `$body` with `$backend` as the backend type of `$device` and `$inner` as that
/// backend's device. Evaluates to `Err` with [`ShardError::UnsupportedDevice`] if no
/// [`ModelBackend`] serves the device.
macro_rules! with_backend {
    ($device:expr, |$backend:ident, $inner:ident| $body:expr) => {{
        use burn::backend::DispatchDevice;
        let device = $device.clone().inner();
        match device.as_dispatch() {
            #[cfg(feature = "flex")]
            DispatchDevice::Flex($inner) => {
                type $backend = burn::backend::Flex;
                let $inner = $crate::backend::clone_device($inner);
                $body
            }
            #[cfg(feature = "cube")]
            DispatchDevice::Cube($inner) => {
                type $backend = burn::backend::Cube;
                let $inner = $crate::backend::clone_device($inner);
                $body
            }
            #[allow(unreachable_patterns)]
            _ => Err($crate::backend::unsupported_device(&device).into()),
        }
    }};
}
pub(crate) use with_backend;

/// Launches the operations that the calling thread has recorded on the device, and waits until the
/// device has run all that it was given. Does nothing for devices that no [`ModelBackend`] serves.
///
/// # Errors
///
/// The device's description of an operation that has failed.
pub(crate) fn finish(device: &burn::tensor::Device) -> Result<(), String> {
    let finished: Result<Result<(), String>, ShardError> = with_backend!(device, |B, inner| {
        <B as ModelBackend>::drain(&inner);
        Ok(<Raw<B> as Backend>::sync(&inner).map_err(|error| format!("{error:?}")))
    });
    finished.unwrap_or(Ok(()))
}

/// Returns whether the device belongs to Flex, Burn's CPU backend, whose tensors are in host
/// memory.
pub(crate) fn is_flex(device: &burn::tensor::Device) -> bool {
    #[cfg(feature = "flex")]
    {
        let device = device.clone().inner();
        matches!(device.as_dispatch(), burn::backend::DispatchDevice::Flex(_))
    }
    #[cfg(not(feature = "flex"))]
    {
        let _ = device;
        false
    }
}

/// Kind of the device that computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceKind {
    /// Burn's CPU backend.
    Flex,
    /// An NVIDIA GPU.
    Cuda,
    /// Any other CubeCL device.
    Other,
}

impl DeviceKind {
    /// Returns the kind of a device.
    pub(crate) fn of(device: &burn::tensor::Device) -> Self {
        #[cfg(feature = "cuda")]
        {
            use burn::backend::DispatchDevice;
            use burn_cubecl::CubeDevice;
            let device = device.clone().inner();
            if matches!(device.as_dispatch(), DispatchDevice::Cube(CubeDevice::Cuda(_))) {
                return Self::Cuda;
            }
        }
        if is_flex(device) { Self::Flex } else { Self::Other }
    }
}

/// Returns the host's device with the feature `flex`, and `device` without it.
pub(crate) fn host_device(device: &burn::tensor::Device) -> burn::tensor::Device {
    #[cfg(feature = "flex")]
    {
        let _ = device;
        burn::tensor::Device::flex()
    }
    #[cfg(not(feature = "flex"))]
    device.clone()
}

/// Checks that a [`ModelBackend`] serves the device.
pub(crate) fn check_device(device: &burn::tensor::Device) -> Result<(), ShardError> {
    with_backend!(device, |B, _inner| {
        let _ = <B as ModelBackend>::RECORDS;
        Ok(())
    })
}

/// Clones a device. [`with_backend`] calls it instead of `clone`, on which Clippy warns for devices
/// that are `Copy`.
pub(crate) fn clone_device<T: Clone>(device: &T) -> T {
    device.clone()
}

/// Returns the error for a device that no [`ModelBackend`] serves.
pub(crate) fn unsupported_device(device: &burn::tensor::Device) -> ShardError {
    ShardError::UnsupportedDevice { device: format!("{device:?}") }
}

/// Implements `from_dispatch` and `into_dispatch` of
/// [`ModelBackend`](super::model_backend::ModelBackend) for a backend.
macro_rules! dispatch {
    ($backend:ty) => {
        fn from_dispatch(mut tensor: burn::tensor::DispatchTensor) -> Option<FloatTensor<Self>> {
            use burn::backend::{
                BackendTensor, DispatchAutodiffContext, DispatchKindConversion as To,
            };
            use burn::tensor::DispatchTensor as Any;
            let context = tensor.autodiff;
            if context == DispatchAutodiffContext::Disabled {
                match <Any as To<$backend>>::try_into_backend(tensor).ok()? {
                    BackendTensor::Float(tensor) => return Some(FloatTensor::Plain(tensor)),
                    _ => return None,
                }
            }
            // The conversion accepts one checkpointing strategy only; the tensor is equal under all
            // of them.
            tensor.autodiff = DispatchAutodiffContext::Enabled(Default::default());
            match <Any as To<burn::backend::Autodiff<$backend>>>::try_into_backend(tensor).ok()? {
                BackendTensor::Float(tensor) => Some(FloatTensor::Autodiff(tensor, context)),
                _ => None,
            }
        }

        fn into_dispatch(value: FloatTensor<Self>) -> burn::tensor::DispatchTensor {
            use burn::backend::{BackendTensor, DispatchKindConversion as To};
            use burn::tensor::DispatchTensor as Any;
            match value {
                FloatTensor::Plain(tensor) => {
                    <Any as To<$backend>>::from_backend(BackendTensor::Float(tensor))
                }
                FloatTensor::Autodiff(tensor, context) => {
                    let tensor = BackendTensor::Float(tensor);
                    let mut tensor =
                        <Any as To<burn::backend::Autodiff<$backend>>>::from_backend(tensor);
                    tensor.autodiff = context;
                    tensor
                }
            }
        }
    };
}
pub(crate) use dispatch;

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::backend::DispatchDevice;
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn a_device_of_another_backend_is_refused() {
        let flex = Device::flex();
        assert_eq!(check_device(&flex), Ok(()));
        assert_eq!(check_device(&flex.clone().autodiff()), Ok(()));

        // Devices of other backends need features of Burn. Two layers of autodiff do not, and no
        // backend here has them either.
        let other = DispatchDevice::autodiff(DispatchDevice::autodiff(flex.as_dispatch().clone()));
        let error = check_device(&Device::new(other)).unwrap_err();
        let ShardError::UnsupportedDevice { device } = &error else { panic!("{error}") };
        assert!(device.contains("Autodiff"), "{device}");
        assert!(error.to_string().contains("remote devices"), "{error}");
    }
}
