//! Device names that `--device` accepts, and the Burn device of each.

use std::str::FromStr;

#[cfg(feature = "cuda")]
use anyhow::anyhow;
use anyhow::{Result, bail};
use burn::tensor::Device;

/// Name of a device. [`DeviceName::resolve`] checks that this build and this machine have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceName {
    /// CUDA if it is compiled in, Flex otherwise.
    Auto,
    /// Burn's CPU backend in pure Rust.
    Flex,
    /// CubeCL's CPU runtime.
    Cpu,
    /// Default GPU of `wgpu`.
    Wgpu,
    /// CUDA device with this index.
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
    /// Returns the device.
    ///
    /// # Errors
    ///
    /// If the device's feature is not compiled in, or if the GPU does not exist. The GPU is looked
    /// up with the CUDA driver because Burn panics for one that does not exist.
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
            Self::Cuda(index) => {
                let found = fsdp_runtime::launch::cuda::require_device(index);
                found.map_err(|error| anyhow!("--device cuda: {error} (`--device flex`)"))?;
                Ok(Device::cuda(index))
            }
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

    /// Returns the device. Without the device, prints the error on one line and exits with code 1:
    /// a missing device is no bug, so a backtrace would not help.
    pub fn resolve_or_exit(self) -> Device {
        self.resolve().unwrap_or_else(|error| {
            eprintln!("Error: {error}");
            std::process::exit(1);
        })
    }

    /// Returns the default number of ranks that are threads: one per GPU, or 2 on other devices.
    pub fn default_ranks(self) -> usize {
        #[cfg(feature = "cuda")]
        if let Self::Auto | Self::Cuda(_) = self {
            let first = if let Self::Cuda(first) = self { first } else { 0 };
            return fsdp_runtime::launch::cuda::device_count()
                .map_or(1, |count| count - first.min(count - 1));
        }
        2
    }

    /// Returns the cargo feature that compiles the device in.
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

    /// Starts this test program again so that it runs [`as_a_program`] alone, in place of the
    /// example.
    #[cfg(feature = "cuda")]
    #[test]
    fn without_a_gpu_the_program_ends_with_one_line() {
        if fsdp_runtime::launch::cuda::device_count().is_ok() {
            return eprintln!("skipped: this machine has a GPU");
        }
        let mut program = std::process::Command::new(std::env::current_exe().unwrap());
        program.args([
            "--exact",
            "common::device::tests::as_a_program",
            "--ignored",
            "--nocapture",
        ]);
        let output = program.env("RUST_BACKTRACE", "1").output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.starts_with("Error: --device cuda: no CUDA device was found: "), "{text}");
        assert!(text.contains("--device flex"), "{text}");
    }

    #[cfg(feature = "cuda")]
    #[test]
    #[ignore = "started by `without_a_gpu_the_program_ends_with_one_line`"]
    fn as_a_program() {
        use clap::Parser;
        crate::start(&crate::cli::Cli::parse_from(["program", "--device", "cuda"])).unwrap();
    }
}
