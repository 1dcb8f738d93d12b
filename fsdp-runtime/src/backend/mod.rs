//! The operations that sharding requires of a Burn backend: buffers that tensors view, own kernels,
//! and tensors that are stored on the device or in host memory.
//!
//! A file uses only files earlier in this order: host_data; shard_backend; model_backend;
//! flex_memory; flex; fence, cube and recorded; stored_tensor and gather_buffer; ops. Unit tests add
//! stream_order, which fence, cube and recorded report to. The kernels are in the crate
//! `fsdp-kernels`.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "cube")]
mod fence;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "flex")]
mod flex_memory;
pub(crate) mod gather_buffer;
mod host_data;
mod model_backend;
pub(crate) mod ops;
#[cfg(feature = "cube")]
mod recorded;
mod shard_backend;
mod stored_tensor;
#[cfg(all(test, feature = "cube"))]
pub(crate) mod stream_order;

#[cfg(all(test, feature = "flex", feature = "nccl"))]
pub(crate) use self::flex::BUSY;
pub(crate) use self::host_data::{owned_bytes, owned_data};
pub(crate) use self::model_backend::{
    AutodiffContext, DeviceKind, FloatTensor, ModelBackend, Raw, RawFloat, cast_all_model,
    cast_model, check_device, clone_device, finish, host_device, is_flex, unsupported_device,
    with_backend,
};
pub(crate) use self::shard_backend::{ShardBackend, bytes, decoded, encoded, numel};
pub(crate) use self::stored_tensor::{StorageDevice, StoredLeaf, StoredTensor, new_leaf};
pub use fsdp_kernels::Norm;
pub(crate) use fsdp_kernels::{Float, Tracked, cast};
