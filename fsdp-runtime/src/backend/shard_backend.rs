//! What sharding asks of a Burn backend: memory that tensors view while it is rewritten.
//!
//! Two backends have it: Flex ([`flex`](super::flex)) and the CubeCL one ([`cube`](super::cube)), which is every CubeCL
//! device. Everything above is generic over [`ShardBackend`] and holds no unsafe code.

use std::fmt::Debug;
use std::ops::Range;
#[cfg(feature = "mpi")]
use std::ptr::NonNull;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Autodiff, Backend, TensorMetadata};
use burn::tensor::{DType, DispatchTensor, Shape, Tensor, TensorData};

use super::kernels::{self, Kernels};
use super::norm::Norm;
use super::tensor::{Float, Tracked};
use crate::error::ShardError;

/// A Burn tensor taken apart for backend `B`.
pub(crate) enum Value<B: Backend> {
    /// Without autodiff.
    Plain(Float<B>),
    /// On an autodiff device, whether tracked or not.
    Autodiff(Tracked<B>, Context),
}

/// Where a buffer lies on a CUDA device. It stays there as long as this lives.
#[cfg(feature = "nccl")]
pub(crate) struct DeviceMemory {
    /// The address of its first element.
    pub(crate) start: u64,
    /// What keeps it in its place.
    pub(crate) _held: Box<dyn std::any::Any + Send>,
}

/// The autodiff context a tensor came with, to give back: it names the checkpointing strategy.
pub(crate) type Context = burn::backend::DispatchAutodiffContext;

impl<B: ShardBackend> Value<B> {
    /// The type of its elements.
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::Plain(tensor) => tensor.dtype(),
            Self::Autodiff(tensor, _) => tensor.dtype(),
        }
    }

    /// The tensor in another type, where one is asked for.
    pub(crate) fn cast(self, dtype: Option<DType>) -> Self {
        match (self, dtype) {
            (Self::Plain(tensor), Some(dtype)) => Self::Plain(cast::<B>(tensor, dtype)),
            (Self::Autodiff(tensor, context), Some(dtype)) if tensor.dtype() != dtype => {
                let tensor = Autodiff::<B>::float_cast(tensor, dtype.into());
                Self::Autodiff(tensor, context)
            }
            (value, _) => value,
        }
    }

    /// The tensor without its node.
    pub(crate) fn into_inner(self) -> Float<B> {
        match self {
            Self::Plain(tensor) => tensor,
            Self::Autodiff(tensor, _) => tensor.into_primitive(),
        }
    }
}

/// A backend whose tensors can view the reusable buffers of [`slot`](crate::backend::gather_buffer).
///
/// The methods on `Memory` never check whether a view is in use: that is the schedule's task, which
/// writes a slot only between its owner's reshard and the next owner's first `val()`.
pub(crate) trait ShardBackend: Kernels {
    /// One reusable buffer of elements of one type, viewed by tensors.
    type Memory: Debug + Send + Sync + 'static;
    /// A tensor's elements as bytes that the host can read; moving it does not move them.
    #[cfg(feature = "mpi")]
    type Host: AsRef<[u8]> + Send;

    /// Takes a Burn tensor apart; `None` when it lies on another backend.
    fn from_dispatch(tensor: DispatchTensor) -> Option<Value<Self>>;
    /// Puts a Burn tensor together.
    fn into_dispatch(value: Value<Self>) -> DispatchTensor;

    /// A zeroed buffer of `numel` elements.
    fn alloc(device: &Self::Device, numel: usize, dtype: DType) -> Self::Memory;
    /// Elements `[offset, offset + shape's)` of the buffer, as a tensor that owns nothing.
    fn view(memory: &Self::Memory, offset: usize, shape: Shape) -> Float<Self>;
    /// Copies all of each tensor to the buffer, from its element on, rounded to the buffer's type.
    fn write(memory: &Self::Memory, parts: Vec<(usize, Float<Self>)>);
    /// Fills the first `numel` elements with NaN, so that a stale read shows.
    fn poison(memory: &Self::Memory, numel: usize);
    /// Orders every later [`write`](Self::write) after the reads issued by this thread until now.
    fn release(memory: &Self::Memory);
    /// Waits until this thread's writes can be seen by any thread's reads.
    fn complete(device: &Self::Device);
    /// A tensor that does not look into the buffer: `tensor` itself, or a copy.
    fn detach(memory: &Self::Memory, tensor: Float<Self>) -> Float<Self>;

    /// The buffer's first byte, where the host can write it without a copy.
    #[cfg(feature = "mpi")]
    fn host_memory(memory: &Self::Memory) -> Option<NonNull<u8>>;
    /// The tensor's elements in order: itself, where it lies so in the host's memory, or a copy.
    #[cfg(feature = "mpi")]
    fn host(tensor: Float<Self>) -> Self::Host;

    /// The buffer, for code outside Burn, or why it has none: this thread's stream comes after all
    /// that was issued on the buffer, by whatever thread, until now.
    #[cfg(feature = "nccl")]
    fn device_memory(memory: &Self::Memory) -> Result<DeviceMemory, String>;

    /// A copy of `range` of the flattened tensor, in memory of its own, of the given shape.
    fn copy_range(tensor: Float<Self>, range: Range<usize>, shape: Shape) -> Float<Self>;
    /// The mean over `parts`, of one type, of `range` of each flattened part: sums in order, in f32,
    /// then divides by `divisor`. An element's result, in f32, depends on nothing but the parts'
    /// elements at that place.
    fn mean(
        parts: &[Float<Self>],
        range: Range<usize>,
        divisor: usize,
        shape: Shape,
    ) -> Float<Self>;
    /// What each range of its flattened tensor adds to a norm. The result depends on the elements
    /// and their order alone, so that every strategy finds the same norm.
    fn norm_sums(parts: &[(Float<Self>, Range<usize>)], norm: Norm) -> Vec<f64>;

    /// A copy of the tensor in the host's memory; `None` where it lies there already.
    fn to_host(tensor: Float<Self>) -> Option<TensorData>;

    /// Shows the elements in order, as bytes of the host.
    fn with_bytes(tensor: Float<Self>, f: &mut dyn FnMut(&[u8])) {
        f(to_data::<Self>(tensor).as_bytes());
    }
}

/// The tensor in another type: itself, where it has that one.
pub(crate) fn cast<B: ShardBackend>(tensor: Float<B>, dtype: DType) -> Float<B> {
    match tensor.dtype() {
        found if found == dtype => tensor,
        found if kernels::takes(found) && kernels::takes(dtype) => B::cast(tensor, dtype, None),
        _ => B::float_cast(tensor, dtype.into()),
    }
}

/// The tensor's elements in the host's memory, in order.
pub(crate) fn to_data<B: ShardBackend>(tensor: Float<B>) -> TensorData {
    let (shape, numel) = (tensor.shape(), numel::<B>(&tensor));
    let flat = B::float_reshape(tensor, Shape::from([numel]));
    let flat = Tensor::<1>::from_dispatch(B::into_dispatch(Value::Plain(flat)));
    let (bytes, _, dtype) = flat.into_data().into_parts();
    TensorData::from_bytes(bytes, shape, dtype)
}

/// The tensor on Flex.
#[cfg(feature = "flex")]
pub(crate) fn to_host<B: ShardBackend>(tensor: Float<B>) -> Float<burn::backend::Flex> {
    burn::backend::flex::FlexTensor::from_data(to_data::<B>(tensor))
}

/// A tensor of Flex on a device; `pinned` asks for a copy through pages that stay in place.
#[cfg(feature = "flex")]
pub(crate) fn from_host<B: ShardBackend>(
    tensor: Float<burn::backend::Flex>,
    device: &B::Device,
    pinned: bool,
) -> Float<B> {
    let mut data = tensor.into_data();
    if pinned {
        B::staging(std::iter::once(&mut data), device);
    }
    B::float_from_data(data, device)
}

/// Bytes of a tensor's elements.
pub(crate) fn bytes<B: ShardBackend>(tensor: &Float<B>) -> usize {
    numel::<B>(tensor) * tensor.dtype().size()
}

/// Elements of a tensor.
pub(crate) fn numel<B: ShardBackend>(tensor: &Float<B>) -> usize {
    tensor.shape().num_elements()
}

/// Runs `$body` with `$backend` naming the backend of `$device`, or returns the error that says
/// that none shards on it.
macro_rules! with_backend {
    ($device:expr, |$backend:ident, $inner:ident| $body:expr) => {{
        use burn::backend::DispatchDevice;
        let device = $device.clone().inner();
        match device.as_dispatch() {
            #[cfg(feature = "flex")]
            DispatchDevice::Flex($inner) => {
                type $backend = burn::backend::Flex;
                let $inner = $crate::backend::owned($inner);
                $body
            }
            #[cfg(feature = "cube")]
            DispatchDevice::Cube($inner) => {
                type $backend = burn::backend::Cube;
                let $inner = $crate::backend::owned($inner);
                $body
            }
            #[allow(unreachable_patterns)]
            _ => Err($crate::backend::unsupported(&device).into()),
        }
    }};
}
pub(crate) use with_backend;

/// Whether a device is Burn's CPU backend, whose tensors lie in the host's memory.
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

/// A device of one's own; some are `Copy`, some are not.
pub(crate) fn owned<T: Clone>(device: &T) -> T {
    device.clone()
}

pub(crate) fn unsupported(device: &burn::tensor::Device) -> ShardError {
    ShardError::UnsupportedDevice { device: format!("{device:?}") }
}

/// `from_dispatch` and `into_dispatch`, the same words for each backend's own types.
macro_rules! dispatch {
    ($backend:ty) => {
        fn from_dispatch(mut tensor: burn::tensor::DispatchTensor) -> Option<Value<Self>> {
            use burn::backend::{
                BackendTensor, DispatchAutodiffContext, DispatchKindConversion as To,
            };
            use burn::tensor::DispatchTensor as Any;
            let context = tensor.autodiff;
            if context == DispatchAutodiffContext::Disabled {
                match <Any as To<$backend>>::try_into_backend(tensor).ok()? {
                    BackendTensor::Float(tensor) => return Some(Value::Plain(tensor)),
                    _ => return None,
                }
            }
            // The conversion is for one checkpointing strategy; the tensor is the same for all.
            tensor.autodiff = DispatchAutodiffContext::Enabled(Default::default());
            match <Any as To<burn::backend::Autodiff<$backend>>>::try_into_backend(tensor).ok()? {
                BackendTensor::Float(tensor) => Some(Value::Autodiff(tensor, context)),
                _ => None,
            }
        }

        fn into_dispatch(value: Value<Self>) -> burn::tensor::DispatchTensor {
            use burn::backend::{BackendTensor, DispatchKindConversion as To};
            use burn::tensor::DispatchTensor as Any;
            match value {
                Value::Plain(tensor) => {
                    <Any as To<$backend>>::from_backend(BackendTensor::Float(tensor))
                }
                Value::Autodiff(tensor, context) => {
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
