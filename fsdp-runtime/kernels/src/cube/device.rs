//! Properties of a CubeCL device that kernels depend on.

use burn::tensor::DType;
use cubecl::client::Client;

/// Returns whether the device is CubeCL's CPU device, which runs only a few threads of a kernel at
/// a time.
pub(super) fn on_cpu(client: &Client) -> bool {
    client.properties().hardware.num_cpu_cores.is_some()
}

/// Returns the compute capability of an NVIDIA GPU, such as 90 for 9.0, and `None` for other devices.
pub(super) fn compute_capability(client: &Client) -> Option<u32> {
    client.properties().identity.fingerprint.strip_prefix("ptx_sm")?.parse().ok()
}

/// Returns whether CubeCL's compiler for CPUs can round to bf16. It needs an instruction for that:
/// without it the compiled code calls a function that does not exist.
pub fn cpu_rounds_to_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    true
}

/// Returns whether a kernel must round to `dtype` with integer operations, because the device's
/// compiler cannot.
pub(super) fn rounds_in_integers(client: &Client, dtype: DType) -> bool {
    dtype == DType::BF16 && on_cpu(client) && !cpu_rounds_to_bf16()
}
