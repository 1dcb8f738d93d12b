//! Elements in host memory.
//!
//! On CubeCL devices Burn's `into_data` returns bytes that are read from the device when they are
//! first used. Until they are dropped they hold the device's memory, and they show what the memory
//! holds when they are read, even if it has been updated since.

use burn::tensor::{Bytes, TensorData};
use burn_std::AllocationProperty;

/// Reads bytes that are still on the device, now, and releases the device's memory.
pub(crate) fn owned_bytes(bytes: Bytes) -> Bytes {
    match bytes.property() {
        AllocationProperty::Native | AllocationProperty::File => bytes,
        // CubeCL's CPU device passes its own memory, and pinned memory belongs to the device's pools.
        _ => Bytes::from_bytes_vec(bytes.to_vec()),
    }
}

/// Reads elements that are still on the device, now, and releases the device's memory.
pub(crate) fn owned_data(data: TensorData) -> TensorData {
    let (bytes, shape, dtype) = data.into_parts();
    TensorData::from_bytes(owned_bytes(bytes), shape, dtype)
}
