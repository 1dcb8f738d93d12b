//! The kernels of sharded training, each for Flex (`flex`) and for CubeCL devices (`cube`).

pub(crate) mod batched_steps;
mod contract;
#[cfg(feature = "cube")]
pub(crate) mod cube;
#[cfg(feature = "flex")]
pub(crate) mod flex;
mod mask;
#[cfg_attr(not(feature = "flex"), allow(dead_code, reason = "the loops are those of Flex"))]
pub(crate) mod update_rules;

use burn::backend::DispatchDevice;
use burn::tensor::{DType, Device, FloatDType};

pub use self::contract::Sums;
pub(crate) use self::contract::{AdamTensors, Kernels};
pub use self::mask::MaskSource;
pub(crate) use self::update_rules::{AdamStep, SgdStep};

/// Whether the device has kernels.
pub(crate) fn has_kernels(device: &Device) -> bool {
    match device.as_dispatch() {
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => true,
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => true,
        #[allow(unreachable_patterns)]
        _ => false,
    }
}

/// Whether kernels take elements of this type.
pub(crate) fn takes(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}

/// Whether Burn computes the dtype on the device: what the device says, and for bf16 on CubeCL's CPU
/// device whether the processor has AVX512-BF16, without which that compiler's rounding fails. These
/// kernels take bf16 there all the same.
pub fn computes(device: &Device, dtype: FloatDType) -> bool {
    #[cfg(feature = "cpu")]
    if dtype == FloatDType::BF16 && [Device::cpu(), Device::cpu().autodiff()].contains(device) {
        return cube::cpu_rounds_to_bf16();
    }
    device.supports_dtype(dtype)
}
