//! What sharding requires of a Burn backend: buffers that tensors view, own kernels, and tensors
//! that are stored on the device or in host memory.
//!
//! A file uses only files earlier in this order: tensor, norm and philox; kernels;
//! shard_backend; flex and cube; stored_tensor and gather_buffer; ops.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;
pub(crate) mod gather_buffer;
pub(crate) mod kernels;
mod norm;
pub(crate) mod ops;
mod philox;
mod shard_backend;
mod stored_tensor;
mod tensor;

pub use self::norm::Norm;
#[cfg(feature = "nccl")]
pub(crate) use self::shard_backend::DeviceMemory;
pub(crate) use self::shard_backend::{
    AutodiffContext, FloatTensor, ShardBackend, bytes, cast, clone_device, is_flex, numel, to_data,
    unsupported_device, with_backend,
};
pub(crate) use self::stored_tensor::{StorageDevice, StoredLeaf, StoredTensor, new_leaf};
pub(crate) use self::tensor::{Float, Tracked};
