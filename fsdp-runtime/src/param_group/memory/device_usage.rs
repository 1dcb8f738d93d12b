//! The memory that Burn's allocator has reserved on a device.

use burn::tensor::Device;

/// Bytes that Burn's allocator has reserved on a device, for all work of this process there.
///
/// The fields correspond to `torch.cuda.memory_allocated` and `torch.cuda.memory_reserved`.
/// [`Memory`](crate::memory::Memory) counts only what a sharded model takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceUsage {
    /// Bytes of the tensors that exist at present.
    pub in_use: usize,
    /// Bytes that the allocator has from the device, for present and future tensors.
    pub reserved: usize,
}

impl DeviceUsage {
    /// Returns the usage of a CubeCL device, or `None` for Flex, whose tensors are in the process's
    /// own memory.
    pub fn of(device: &Device) -> Option<Self> {
        match device.clone().inner().as_dispatch() {
            #[cfg(feature = "cube")]
            burn::backend::DispatchDevice::Cube(device) => {
                use cubecl::MemoryScope;
                let usage = device.client().memory_report(MemoryScope::Device).usage();
                let bytes = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
                Some(Self {
                    in_use: bytes(usage.bytes_in_use),
                    reserved: bytes(usage.bytes_reserved),
                })
            }
            #[allow(unreachable_patterns, reason = "a build may have CubeCL devices only")]
            _ => None,
        }
    }
}

#[cfg(all(test, feature = "cpu", feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn a_cubecl_device_reports_its_allocated_bytes() {
        let device = Device::cpu();
        let tensor = burn::tensor::Tensor::<1>::zeros([1 << 20], &device);
        device.sync().unwrap();
        let DeviceUsage { in_use, reserved } = DeviceUsage::of(&device).expect("a CubeCL device");
        assert!(in_use >= 4 << 20 && reserved >= in_use, "{in_use} {reserved}");
        drop(tensor);
        assert_eq!(DeviceUsage::of(&Device::flex()), None);
    }
}
