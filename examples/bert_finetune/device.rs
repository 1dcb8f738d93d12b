//! The names `--device` takes, and the Burn device each stands for in this build.

use std::str::FromStr;

use anyhow::{Result, bail};
use burn::tensor::Device;

/// A device by name; whether this build has it is settled by [`DeviceName::resolve`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceName {
    /// CUDA where it is compiled in, Flex otherwise.
    Auto,
    /// Burn's CPU backend in plain Rust.
    Flex,
    /// CubeCL's CPU runtime.
    Cpu,
    /// The best GPU that `wgpu` finds.
    Wgpu,
    /// The CUDA device of this index.
    Cuda(usize),
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || "expected auto, flex, cpu, wgpu, cuda or cuda:N".to_string();
        Ok(match text {
            "auto" => Self::Auto,
            "flex" => Self::Flex,
            "cpu" => Self::Cpu,
            "wgpu" => Self::Wgpu,
            "cuda" => Self::Cuda(0),
            _ => {
                let index = text.strip_prefix("cuda:").ok_or_else(unknown)?;
                Self::Cuda(index.parse().map_err(|_| unknown())?)
            }
        })
    }
}

impl DeviceName {
    /// The device of this name.
    ///
    /// # Errors
    ///
    /// If the feature that brings the device is not compiled in.
    pub fn resolve(self) -> Result<Device> {
        match self {
            Self::Auto if cfg!(feature = "cuda") => Self::Cuda(0).resolve(),
            Self::Auto => Self::Flex.resolve(),
            #[cfg(feature = "flex")]
            Self::Flex => Ok(Device::flex()),
            #[cfg(feature = "cpu")]
            Self::Cpu => Ok(Device::cpu()),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => Ok(Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
            #[cfg(feature = "cuda")]
            Self::Cuda(index) => Ok(Device::cuda(index)),
            #[allow(unreachable_patterns)]
            missing => {
                let feature = missing.feature();
                bail!(
                    "--device {feature}: this build has no `{feature}` device; \
                     add `--features {feature}` to the cargo command"
                )
            }
        }
    }

    fn feature(self) -> &'static str {
        match self {
            Self::Auto | Self::Flex => "flex",
            Self::Cpu => "cpu",
            Self::Wgpu => "wgpu",
            Self::Cuda(_) => "cuda",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read() {
        assert_eq!("cuda:3".parse(), Ok(DeviceName::Cuda(3)));
        assert_eq!("auto".parse(), Ok(DeviceName::Auto));
        assert!("cuda:".parse::<DeviceName>().is_err());
        assert!("gpu".parse::<DeviceName>().is_err());
    }
}
