//! The names `--device` takes, and the Burn device each stands for in this build.

use std::str::FromStr;

#[cfg(feature = "cuda")]
use anyhow::anyhow;
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
    /// If the feature that brings the device is not compiled in, or there is no such GPU. The latter
    /// is found before Burn is asked for it, which panics.
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
                let found = fsdp_runtime::cuda::require_device(index);
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

    /// As [`resolve`](Self::resolve); ends the program with one line where it fails: what is missing
    /// is not to be found in the program.
    pub fn resolve_or_exit(self) -> Device {
        self.resolve().unwrap_or_else(|error| {
            eprintln!("Error: {error}");
            std::process::exit(1);
        })
    }

    /// Thread ranks where nothing says how many: one for each GPU, two on other devices.
    pub fn ranks(self) -> usize {
        #[cfg(feature = "cuda")]
        if let Self::Auto | Self::Cuda(_) = self {
            let first = if let Self::Cuda(first) = self { first } else { 0 };
            return fsdp_runtime::cuda::device_count()
                .map_or(1, |count| count - first.min(count - 1));
        }
        2
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

    /// This test program stands for the example: it runs [`as_a_program`] alone.
    #[cfg(feature = "cuda")]
    #[test]
    fn without_a_gpu_the_program_ends_with_one_line() {
        if fsdp_runtime::cuda::device_count().is_ok() {
            return eprintln!("skipped: this machine has a GPU");
        }
        let mut program = std::process::Command::new(std::env::current_exe().unwrap());
        program.args(["--exact", "device::tests::as_a_program", "--ignored", "--nocapture"]);
        let output = program.env("RUST_BACKTRACE", "1").output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.starts_with("Error: --device cuda: no CUDA device was found: "), "{text}");
        assert!(text.contains("--device flex"), "{text}");
    }

    #[cfg(feature = "cuda")]
    #[test]
    #[ignore = "what `without_a_gpu_the_program_ends_with_one_line` starts"]
    fn as_a_program() {
        use clap::Parser;
        crate::start(&crate::cli::Cli::parse_from(["program", "--device", "cuda"])).unwrap();
    }
}
