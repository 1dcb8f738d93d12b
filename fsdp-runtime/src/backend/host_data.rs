//! Elements in host memory.
//!
//! On CubeCL devices Burn's `into_data` returns bytes that are read from the device when they are
//! first used. Until they are dropped they hold the device's memory, and they show what the memory
//! holds when they are read, even if it has been updated since.

use burn::tensor::{Bytes, TensorData};
use burn_std::AllocationProperty;

/// Returns bytes that the host owns. Bytes that are still on the device are read now; bytes in
/// pinned memory, and those of CubeCL's CPU device, which passes its own memory, are copied. The
/// device's memory is released.
pub(crate) fn owned_bytes(bytes: Bytes) -> Bytes {
    match bytes.property() {
        AllocationProperty::Native | AllocationProperty::File => bytes,
        _ => Bytes::from_bytes_vec(bytes.to_vec()),
    }
}

/// Returns elements that the host owns, as [`owned_bytes`] does.
pub(crate) fn owned_data(data: TensorData) -> TensorData {
    let (bytes, shape, dtype) = data.into_parts();
    TensorData::from_bytes(owned_bytes(bytes), shape, dtype)
}
