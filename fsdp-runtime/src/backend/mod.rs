//! What sharding needs of a Burn backend: buffers that tensors view, own kernels, and tensors that are
//! stored on the device or on the host.

#[cfg(feature = "cube")]
pub(crate) mod cube;
#[cfg(feature = "flex")]
pub(crate) mod flex;
pub(crate) mod gather_buffer;
pub(crate) mod kernels;
mod norm;
pub(crate) mod ops;
pub(crate) mod philox;
mod shard_backend;
mod stored;
mod tensor;

pub use self::norm::Norm;
#[cfg(feature = "nccl")]
pub(crate) use self::shard_backend::DeviceMemory;
pub(crate) use self::shard_backend::{
    Context, ShardBackend, Value, bytes, cast, is_flex, numel, owned, to_data, unsupported,
    with_backend,
};
pub(crate) use self::stored::{Leaf, StorageDevice, StoredTensor, new_leaf};
pub(crate) use self::tensor::{Float, Tracked};
