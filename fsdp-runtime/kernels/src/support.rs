//! Devices that have kernels, and dtypes that Burn supports on them.

use burn::backend::DispatchDevice;
use burn::tensor::{Device, FloatDType};

/// Returns whether the device has kernels.
pub fn has_kernels(device: &Device) -> bool {
    match device.as_dispatch() {
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => true,
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => true,
        #[allow(unreachable_patterns)]
        _ => false,
    }
}

/// Returns whether Burn's own operations support the dtype on the device.
///
/// The device itself answers, with one exception: on CubeCL's CPU device bf16 is supported if the
/// processor has AVX512-BF16, without which CubeCL's compiler fails to round to bf16. The functions
/// of this module support bf16 on that device in both cases.
pub fn computes(device: &Device, dtype: FloatDType) -> bool {
    #[cfg(feature = "cpu")]
    if dtype == FloatDType::BF16 && [Device::cpu(), Device::cpu().autodiff()].contains(device) {
        return crate::cube::cpu_rounds_to_bf16();
    }
    device.supports_dtype(dtype)
}
