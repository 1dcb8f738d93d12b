//! [`ShardBackend`]: what sharding requires of a Burn backend, above all buffers that tensors view
//! while the runtime rewrites them.
//!
//! Two backends implement it: Flex ([`flex`](super::flex)) and Burn's CubeCL backend
//! ([`cube`](super::cube)), which serves all CubeCL devices. The code that uses them is generic
//! over [`ShardBackend`]; outside the MPI and NCCL process groups it is free of unsafe code.

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

/// Float tensor of backend `B`, taken out of Burn's [`DispatchTensor`].
pub(crate) enum FloatTensor<B: Backend> {
    /// Tensor of a device without autodiff.
    Plain(Float<B>),
    /// Tensor of an autodiff device, tracked or not.
    Autodiff(Tracked<B>, AutodiffContext),
}

/// Address of a buffer on a CUDA device. The buffer is neither moved nor freed while this value
/// lives.
#[cfg(feature = "nccl")]
pub(crate) struct DeviceMemory {
    /// Device address of the first element.
    pub(crate) start: u64,
    /// Resources of CubeCL that keep the buffer allocated.
    pub(super) _held: Box<dyn std::any::Any + Send>,
}

/// Autodiff context of a [`DispatchTensor`], which names Burn's own checkpointing strategy. A
/// tensor that is put back into a [`DispatchTensor`] gets the context it came with.
pub(crate) type AutodiffContext = burn::backend::DispatchAutodiffContext;

impl<B: ShardBackend> FloatTensor<B> {
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
            (Self::Plain(tensor), Some(dtype)) => Self::Plain(cast::<B>(tensor, dtype)),
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

/// Backend whose tensors can view reusable buffers
/// ([`GatherBuffer`](super::gather_buffer::GatherBuffer)).
///
/// # Note: life of a buffer
///
/// The methods on `Memory` do not check whether a view is in use. The schedule guarantees this
/// order, and repeats it for each unit that uses the buffer:
///
/// 1. The communication thread calls [`write`](Self::write), or code outside Burn writes through
///    [`device_memory`](Self::device_memory) or [`host_memory`](Self::host_memory).
/// 2. The thread that wrote calls [`complete`](Self::complete), then reports the all-gather as
///    finished.
/// 3. The rank's own thread issues operations that read [`view`](Self::view)s.
/// 4. At reshard the rank's own thread calls [`release`](Self::release), in debug builds after
///    [`poison`](Self::poison). Until the next step 2 no operation may read a view.
///
/// A buffer that keeps this rank's part of a unit between forward and backward is different: the
/// rank's own thread writes and completes it, and the all-gather of the backward reads it. That
/// all-gather ends with [`complete`](Self::complete), so such a buffer needs no release.
///
/// Operations of one thread run in the order in which they were issued, on every backend. Between
/// threads only [`release`](Self::release) and [`complete`](Self::complete) order them.
pub(crate) trait ShardBackend: Kernels {
    /// Reusable buffer of elements of one type, which tensors view.
    type Memory: Debug + Send + Sync + 'static;
    /// Elements of a tensor as bytes that the host can read. Their address is stable when the value
    /// is moved.
    #[cfg(feature = "mpi")]
    type Host: AsRef<[u8]> + Send;

    /// Takes a float tensor of this backend out of Burn's dispatch type. Returns `None` for tensors
    /// of another backend or kind.
    fn from_dispatch(tensor: DispatchTensor) -> Option<FloatTensor<Self>>;
    /// Puts a float tensor of this backend into Burn's dispatch type.
    fn into_dispatch(value: FloatTensor<Self>) -> DispatchTensor;

    /// Allocates a buffer of `numel` zeros.
    fn alloc(device: &Self::Device, numel: usize, dtype: DType) -> Self::Memory;
    /// Returns a tensor of this shape over the buffer's elements from `offset` on, without a copy.
    /// The tensor shows whatever the buffer holds when an operation reads it. It may be created at
    /// any time, from any thread.
    fn view(memory: &Self::Memory, offset: usize, shape: Shape) -> Float<Self>;
    /// Copies each tensor into the buffer from the given offset (in elements) on, rounded to the
    /// buffer's type. The copies run after the reads that the last [`release`](Self::release)
    /// covers. Other threads may read the result after [`complete`](Self::complete).
    ///
    /// # Panics
    ///
    /// If a tensor exceeds the buffer.
    fn write(memory: &Self::Memory, parts: Vec<(usize, Float<Self>)>);
    /// Fills the first `numel` elements with NaN, so that a read of a resharded parameter shows.
    /// Called by the rank's own thread, after its last read and before [`release`](Self::release).
    fn poison(memory: &Self::Memory, numel: usize);
    /// Orders each later [`write`](Self::write) or [`device_memory`](Self::device_memory), of any
    /// thread, after all operations that the calling thread has issued so far. Called by the thread
    /// that read the views. Does not wait.
    fn release(memory: &Self::Memory);
    /// Blocks until all operations that the calling thread has issued on the device have run.
    /// Operations that other threads issue afterwards see their results.
    fn complete(device: &Self::Device);
    /// Returns `tensor`, or a copy if it is a view of the buffer. Called by the rank's own thread
    /// before [`release`](Self::release), for a tensor that is read after it.
    fn detach(memory: &Self::Memory, tensor: Float<Self>) -> Float<Self>;

    /// Returns the address of the buffer's first byte if the buffer is in host memory. Writing
    /// there is subject to the rules of [`write`](Self::write).
    #[cfg(feature = "mpi")]
    fn host_memory(memory: &Self::Memory) -> Option<NonNull<u8>>;
    /// Returns the tensor's elements in order, as host memory: the tensor itself if it is
    /// contiguous and in host memory, else a copy.
    #[cfg(feature = "mpi")]
    fn host(tensor: Float<Self>) -> Self::Host;

    /// Returns the buffer's device address, for code outside Burn, or the reason why it has none.
    ///
    /// Work that the calling thread's stream runs afterwards comes after the reads that the last
    /// [`release`](Self::release) covers, and after the calling thread's own writes.
    #[cfg(feature = "nccl")]
    fn device_memory(memory: &Self::Memory) -> Result<DeviceMemory, String>;

    /// Copies `range` of the flattened tensor to a new tensor of the given shape.
    fn copy_range(tensor: Float<Self>, range: Range<usize>, shape: Shape) -> Float<Self>;
    /// Returns the mean over `parts` of their flattened elements `range`, in f32: added in f32 in
    /// the order of `parts`, then divided by `divisor`. All parts have one dtype. Each element of
    /// the result depends only on the parts' elements at its index.
    fn mean(
        parts: &[Float<Self>],
        range: Range<usize>,
        divisor: usize,
        shape: Shape,
    ) -> Float<Self>;
    /// Returns the contribution to a norm of each flattened tensor's elements in the range. It
    /// depends only on these elements and their order, so that all sharding strategies find the
    /// same norm.
    fn norm_sums(parts: &[(Float<Self>, Range<usize>)], norm: Norm) -> Vec<f64>;

    /// Copies the tensor to host memory. Returns `None` if it is in host memory already.
    fn to_host(tensor: Float<Self>) -> Option<TensorData>;

    /// Calls `f` once, with the bytes of all elements in order.
    fn with_bytes(tensor: Float<Self>, f: &mut dyn FnMut(&[u8])) {
        f(to_data::<Self>(tensor).as_bytes());
    }
}

/// Returns the tensor cast to `dtype`, or itself if it has that dtype.
pub(crate) fn cast<B: ShardBackend>(tensor: Float<B>, dtype: DType) -> Float<B> {
    match tensor.dtype() {
        found if found == dtype => tensor,
        found if kernels::takes(found) && kernels::takes(dtype) => B::cast(tensor, dtype, None),
        _ => B::float_cast(tensor, dtype.into()),
    }
}

/// Copies the tensor's elements to host memory, in order.
pub(crate) fn to_data<B: ShardBackend>(tensor: Float<B>) -> TensorData {
    let (shape, numel) = (tensor.shape(), numel::<B>(&tensor));
    let flat = B::float_reshape(tensor, Shape::from([numel]));
    let flat = Tensor::<1>::from_dispatch(B::into_dispatch(FloatTensor::Plain(flat)));
    let (bytes, _, dtype) = flat.into_data().into_parts();
    TensorData::from_bytes(bytes, shape, dtype)
}

/// Copies the tensor to Flex, into host memory.
#[cfg(feature = "flex")]
pub(super) fn to_flex<B: ShardBackend>(tensor: Float<B>) -> Float<burn::backend::Flex> {
    burn::backend::flex::FlexTensor::from_data(to_data::<B>(tensor))
}

/// Copies a tensor of Flex to a device; if `pinned`, through page-locked memory.
#[cfg(feature = "flex")]
pub(super) fn from_flex<B: ShardBackend>(
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

/// Returns the size of a tensor's elements in bytes.
pub(crate) fn bytes<B: ShardBackend>(tensor: &Float<B>) -> usize {
    numel::<B>(tensor) * tensor.dtype().size()
}

/// Returns the number of elements of a tensor.
pub(crate) fn numel<B: ShardBackend>(tensor: &Float<B>) -> usize {
    tensor.shape().num_elements()
}

/// Evaluates `$body` with `$backend` as the backend type of `$device` and `$inner` as that
/// backend's device. Evaluates to `Err` with [`ShardError::UnsupportedDevice`] if no
/// [`ShardBackend`] serves the device.
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

/// Clones a device. [`with_backend`] calls it instead of `clone`, on which Clippy warns for devices
/// that are `Copy`.
pub(crate) fn clone_device<T: Clone>(device: &T) -> T {
    device.clone()
}

/// Returns the error for a device that no [`ShardBackend`] serves.
pub(crate) fn unsupported_device(device: &burn::tensor::Device) -> ShardError {
    ShardError::UnsupportedDevice { device: format!("{device:?}") }
}

/// Implements `from_dispatch` and `into_dispatch` of [`ShardBackend`] for a backend.
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
pub(super) use dispatch;
