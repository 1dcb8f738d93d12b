//! [`ShardBackend`]: what sharding requires of a Burn backend, above all buffers that tensors view
//! while the runtime rewrites them.
//!
//! Two backends implement it: Flex ([`flex`](super::flex)) and Burn's CubeCL backend
//! ([`cube`](super::cube)), which serves all CubeCL devices. The code that uses them is generic
//! over [`ShardBackend`]; outside the MPI and NCCL process groups it is free of unsafe code.

use std::borrow::Cow;
use std::fmt::Debug;
#[cfg(feature = "mpi")]
use std::ops::Deref;
use std::ops::Range;
#[cfg(feature = "mpi")]
use std::ptr::NonNull;

#[cfg(feature = "flex")]
use burn::backend::flex::FlexDevice;
use burn::backend::{Backend, TensorMetadata};
#[cfg(feature = "flex")]
use burn::backend::{Flex, ops::FloatTensorOps};
use burn::tensor::{DType, Shape, TensorData};
#[cfg(feature = "flex")]
use fsdp_kernels::flex::{cast_when_copied, copy_of_bytes};
use fsdp_kernels::{Float, Kernels, Norm, cast, codes, takes};

use crate::layout::StorageType;

/// Address of a buffer on a CUDA device, and the stream for work on it. The buffer is neither moved nor
/// freed while this value lives.
#[cfg(feature = "nccl")]
pub(crate) struct DeviceMemory {
    /// Device address of the first element.
    pub(crate) start: u64,
    /// CubeCL's stream of the thread that asked, a `CUstream`; 0 in host memory.
    pub(crate) stream: u64,
    /// Resources of CubeCL that keep the buffer allocated.
    pub(super) _held: Box<dyn std::any::Any + Send>,
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
/// 2. The thread that wrote makes a [`fence`](Self::fence) and passes it on with the result of the
///    all-gather.
/// 3. The rank's own thread [waits for](Self::wait_for) the fence, and issues operations that read
///    [`view`](Self::view)s.
/// 4. At reshard the rank's own thread calls [`release`](Self::release), in debug builds after
///    [`poison`](Self::poison). Until the next step 2 no operation may read a view.
///
/// A buffer that keeps this rank's part of a unit between forward and backward is different. The
/// rank's own thread writes it, and the all-gather of the backward reads it, after a fence. The
/// next write comes after the fence of that all-gather, so such a buffer needs no release.
///
/// Operations of one thread run in the order in which they were issued, on every backend. Between
/// threads only [`release`](Self::release) and [`fence`](Self::fence) order them.
pub(crate) trait ShardBackend: Kernels {
    /// Mark of the operations that a thread has issued, for other threads to wait for.
    type Fence: Clone + Debug + Send + Sync + 'static;
    /// Reusable buffer of elements of one type, which tensors view.
    type Memory: Debug + Send + Sync + 'static;
    /// Elements of a tensor as bytes that the host can read. Their address is stable when the value
    /// is moved.
    #[cfg(feature = "mpi")]
    type Host: Deref<Target = [u8]> + Send;

    /// Allocates a buffer of `numel` zeros.
    fn alloc(device: &Self::Device, numel: usize, dtype: DType) -> Self::Memory;
    /// Returns a tensor of this shape over the buffer's elements from `offset` on, without a copy.
    /// The tensor shows whatever the buffer holds when an operation reads it. It may be created at
    /// any time, from any thread.
    fn view(memory: &Self::Memory, offset: usize, shape: Shape) -> Float<Self>;
    /// Copies each tensor into the buffer from the given offset (in elements) on, rounded to the
    /// buffer's type. The copies run after the reads that the last [`release`](Self::release)
    /// covers. Other threads may read the result after a [`fence`](Self::fence).
    ///
    /// # Panics
    ///
    /// If a tensor exceeds the buffer.
    fn write(memory: &Self::Memory, parts: Vec<(usize, Float<Self>)>);
    /// Writes the elements of whole records of codes ([`Kernels::decode`]) to the start of the buffer,
    /// rounded to the buffer's type. Ordered as [`write`](Self::write) is.
    ///
    /// # Panics
    ///
    /// If the records have more elements than the buffer.
    fn decode_into(memory: &Self::Memory, codes: Float<Self>, storage: StorageType);
    /// Fills the first `numel` elements with NaN, so that a read of a resharded parameter shows.
    /// Called by the rank's own thread, after its last read and before [`release`](Self::release).
    fn poison(memory: &Self::Memory, numel: usize);
    /// Orders each later [`write`](Self::write) or [`device_memory`](Self::device_memory), of any
    /// thread, after all operations that the calling thread has issued so far. Called by the thread
    /// that read the views. Does not wait.
    fn release(memory: &Self::Memory);
    /// Marks the operations that the calling thread has issued on the device so far, and those that
    /// it has waited for.
    fn fence(device: &Self::Device) -> Self::Fence;
    /// Orders all later operations of the calling thread after those that `fence` marks. Does not
    /// block the thread.
    fn wait_for(fence: &Self::Fence);
    /// Returns `tensor`, or a copy if it is a view of the buffer. Called by the rank's own thread
    /// before [`release`](Self::release), for a tensor that is read after it.
    fn detach(memory: &Self::Memory, tensor: Float<Self>) -> Float<Self>;

    /// Whether tensors can be stored in a buffer ([`place`](Self::place)), and other threads can read
    /// them there.
    const PLACES: bool = false;
    /// Returns whether the tensor is stored in the buffer, from `offset` (in elements) on.
    fn lies_in(memory: &Self::Memory, offset: usize, tensor: &Float<Self>) -> bool {
        let _ = (memory, offset, tensor);
        false
    }
    /// Copies the tensor to a part of the buffer, and returns the tensor that is stored there, which Burn
    /// may write. Returns `None` if another tensor is stored in the part, or if the dtypes differ.
    fn place(memory: &Self::Memory, offset: usize, tensor: &Float<Self>) -> Option<Float<Self>> {
        let _ = (memory, offset, tensor);
        None
    }

    /// Returns the address of the buffer's first byte if the buffer is in host memory. Writing
    /// there is subject to the rules of [`write`](Self::write).
    #[cfg(feature = "mpi")]
    fn host_memory(memory: &Self::Memory) -> Option<NonNull<u8>>;
    /// Returns the tensor's elements in order, as host memory: the tensor itself if it is
    /// contiguous and in host memory, else a copy.
    #[cfg(feature = "mpi")]
    fn host(tensor: Float<Self>) -> Self::Host;

    /// Returns the buffer's device address and the calling thread's stream, for a library that reads and
    /// writes the buffer, or the reason why it has none.
    ///
    /// Work that is put on the stream afterwards comes after the reads that the last
    /// [`release`](Self::release) covers, and after the calling thread's own writes.
    #[cfg(feature = "nccl")]
    fn device_memory(memory: &Self::Memory) -> Result<DeviceMemory, String>;

    /// Runs `f` while nothing is allocated, freed or launched on the device. Devices without a thread for
    /// this just run it. The error says why that thread could not.
    #[cfg(feature = "nccl")]
    fn alone_on_device<R: Send>(
        _: &Self::Device,
        f: impl FnOnce() -> R + Send,
    ) -> Result<R, String> {
        Ok(f())
    }

    /// Copies `range` of the flattened tensor to a new tensor of the given shape.
    fn copy_range(tensor: Float<Self>, range: Range<usize>, shape: Shape) -> Float<Self>;
    /// Returns the contribution to a norm of each flattened tensor's elements in the range. It
    /// depends only on these elements and their order, so that all sharding strategies find the
    /// same norm.
    fn norm_sums(parts: &[(Float<Self>, Range<usize>)], norm: Norm) -> Vec<f64>;

    /// Copies the tensor's elements to host memory, in order. The copy holds no memory of the
    /// device.
    fn to_data(tensor: Float<Self>) -> TensorData;
    /// Returns whether the backend's tensors are in host memory.
    const IN_HOST_MEMORY: bool;

    /// Calls `f` once, with the bytes of all elements in order.
    fn with_bytes(tensor: Float<Self>, f: &mut dyn FnMut(&[u8])) {
        f(Self::to_data(tensor).as_bytes());
    }
}

/// Returns the elements of a stored parameter in `dtype`. `stored` is the whole parameter, as
/// `storage` has it.
pub(crate) fn decoded<B: ShardBackend>(
    stored: Float<B>,
    storage: StorageType,
    shape: &[usize],
    dtype: DType,
) -> Float<B> {
    let shape = Shape::from(shape.to_vec());
    if storage.is_coded() {
        return B::decode(stored, storage, shape, dtype);
    }
    let elements = cast::<B>(stored, dtype);
    if elements.shape() == shape { elements } else { B::float_reshape(elements, shape) }
}

/// Returns this rank's part of a parameter as `storage` has it, in shape `shape`. `full` is the whole
/// parameter in f32, and `range` the elements that the rank stores, of which there is at least one.
///
/// Codes of 4 bits are made on the host.
pub(crate) fn encoded<B: ShardBackend>(
    full: Float<B>,
    range: Range<usize>,
    storage: StorageType,
    shape: Shape,
    device: &B::Device,
) -> Float<B> {
    if !storage.is_coded() {
        return cast::<B>(B::copy_range(full, range, shape), storage.dtype());
    }
    if let StorageType::Int8 { block } = storage {
        return B::float_reshape(B::encode_int8(full, range, block), shape);
    }
    let elements = match codes::needs_matrix(storage) {
        true => full,
        false => B::copy_range(full, range.clone(), Shape::from([range.len()])),
    };
    let mut words = Vec::new();
    // Does not copy elements that are in host memory.
    B::with_bytes(elements, &mut |bytes| {
        let copied = || Cow::Owned(bytemuck::pod_collect_to_vec(bytes));
        let elements = bytemuck::try_cast_slice(bytes).map_or_else(|_| copied(), Cow::Borrowed);
        words = codes::encode(&elements, &range, storage);
    });
    B::float_from_data(codes::words_data(words, shape), device)
}

/// Copies the tensor to Flex, into host memory.
#[cfg(feature = "flex")]
pub(super) fn to_flex<B: ShardBackend>(tensor: Float<B>) -> Float<Flex> {
    let (shape, dtype) = (tensor.shape(), tensor.dtype());
    if !takes(dtype) {
        return Flex::float_from_data(B::to_data(tensor), &FlexDevice);
    }
    let mut copy = None;
    B::with_bytes(tensor, &mut |bytes| copy = Some(copy_of_bytes(bytes, shape.clone(), dtype)));
    copy.expect("`with_bytes` calls the function once")
}

/// Copies a tensor of Flex to a device, cast to `dtype`; if `pinned`, through page-locked memory.
#[cfg(feature = "flex")]
pub(super) fn from_flex<B: ShardBackend>(
    tensor: Float<Flex>,
    dtype: DType,
    device: &B::Device,
    pinned: bool,
) -> Float<B> {
    if !pinned || !takes(tensor.dtype()) || !takes(dtype) {
        return B::float_from_data(cast::<Flex>(tensor, dtype).into_data(), device);
    }
    let mut data = cast_when_copied(tensor, dtype);
    B::staging(std::iter::once(&mut data), device);
    B::float_from_data(data, device)
}

/// Returns the size of a tensor's elements in bytes.
pub(crate) fn bytes<B: Backend>(tensor: &Float<B>) -> usize {
    numel::<B>(tensor) * tensor.dtype().size()
}

/// Returns the number of elements of a tensor.
pub(crate) fn numel<B: Backend>(tensor: &Float<B>) -> usize {
    tensor.shape().num_elements()
}
