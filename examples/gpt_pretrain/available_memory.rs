//! Memory that a rank may use: free memory of the host and of GPUs, or `--memory-limit`.

use std::{fmt, fs};

use burn::tensor::Device;
use fsdp_runtime::memory::{MemoryError, MemoryForecast};

use crate::cli::Cli;
use crate::common::device::DeviceName;

/// Bytes that a rank may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AvailableMemory {
    /// Device memory: `--memory-limit`, or the memory of the GPU. `None` if it is not known, or if
    /// the device computes in host memory.
    device: Option<usize>,
    /// Host memory: the rank's part of the free memory. `None` if the system does not report it.
    host: Option<usize>,
    /// Whether device memory is taken from host memory.
    shared: bool,
}

impl AvailableMemory {
    /// Returns the memory available to each of `local_ranks` ranks on this machine. They are
    /// threads of this process, or processes that each have a GPU, if there are GPUs.
    pub fn new(cli: &Cli, local_ranks: usize, threads: bool) -> Self {
        let device = cli.ranks.device;
        let sharing = if threads { local_ranks } else { 1 };
        let on_host = match device {
            DeviceName::Flex | DeviceName::Cpu => true,
            DeviceName::Auto => !cfg!(feature = "cuda"),
            DeviceName::Wgpu | DeviceName::Cuda(_) => false,
        };
        Self {
            device: cli.memory_limit.or_else(|| gpu_memory(device, sharing)),
            host: free_host_memory().map(|free| free / local_ranks),
            shared: on_host && cli.memory_limit.is_none(),
        }
    }

    /// Checks that the forecast fits. Memory that is not known is not checked.
    ///
    /// # Errors
    ///
    /// [`MemoryError`] with the forecast, if it does not fit.
    pub fn check(self, forecast: &MemoryForecast) -> Result<(), MemoryError> {
        self.device.map_or(Ok(()), |bytes| forecast.check(bytes))?;
        self.host.map_or(Ok(()), |bytes| forecast.check_host(bytes, self.shared))
    }
}

impl fmt::Display for AvailableMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: usize| format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30));
        let parts = [(self.device, "of its device"), (self.host, "of the host")];
        let known = parts.into_iter().filter_map(|(bytes, of)| Some((gib(bytes?), of)));
        let known: Vec<String> = known.map(|(bytes, of)| format!("{bytes} {of}")).collect();
        match known.as_slice() {
            [] => f.write_str("the available memory is not known"),
            known => write!(f, "a rank may use {}", known.join(" and ")),
        }
    }
}

/// Returns the GPU memory of each of `ranks` ranks, which share the GPUs from the named one on.
#[cfg(feature = "cuda")]
fn gpu_memory(device: DeviceName, ranks: usize) -> Option<usize> {
    let first = match device {
        DeviceName::Auto => 0,
        DeviceName::Cuda(first) => first,
        _ => return None,
    };
    let gpus = fsdp_runtime::launch::cuda::driver().ok()?.gpus;
    let gpus = gpus.get(first..)?;
    let least = gpus.iter().take(ranks).map(|gpu| gpu.memory).min()?;
    Some(least / ranks.div_ceil(gpus.len()))
}

#[cfg(not(feature = "cuda"))]
fn gpu_memory(_: DeviceName, _: usize) -> Option<usize> {
    None
}

/// Returns the free memory in bytes for the log: GPU memory that Burn has not reserved, which is
/// what fairseq logs, or the free host memory for other devices.
pub fn free_memory(device: &Device) -> Option<usize> {
    #[cfg(feature = "cuda")]
    if let Some(index) = fsdp_runtime::launch::cuda::index_of(device) {
        let gpus = fsdp_runtime::launch::cuda::driver().ok()?.gpus;
        let reserved = fsdp_runtime::memory::DeviceUsage::of(device)?.reserved;
        return Some(gpus.get(index)?.memory.saturating_sub(reserved));
    }
    let _ = device;
    free_host_memory()
}

/// Returns the free memory of the machine in bytes, or that of the process's control group if it is
/// less. `None` on systems other than Linux.
fn free_host_memory() -> Option<usize> {
    let free = parse_meminfo(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let of_group = |name: &str| -> Option<usize> {
        fs::read_to_string(format!("/sys/fs/cgroup/memory.{name}")).ok()?.trim().parse().ok()
    };
    let in_group = of_group("max").zip(of_group("current"));
    Some(in_group.map_or(free, |(max, used)| free.min(max.saturating_sub(used))))
}

/// Returns `MemAvailable` of `/proc/meminfo`, in bytes: what can be allocated without swapping.
fn parse_meminfo(text: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::job::Setup;
    use crate::memory_forecast::forecast;

    fn available(flags: &str) -> AvailableMemory {
        let cli = Cli::parse_from(std::iter::once("gpt_pretrain").chain(flags.split(' ')));
        AvailableMemory::new(&cli, 4, true)
    }

    #[test]
    fn a_limit_replaces_free_memory() {
        let four = 4 << 30;
        for device in ["flex", "cuda", "wgpu"] {
            let limited = available(&format!("--device {device} --memory-limit 4GiB"));
            assert_eq!((limited.device, limited.shared), (Some(four), false));
        }
        assert_eq!(available("--device wgpu").device, None);
        let flex = available("--device flex");
        assert_eq!((flex.device, flex.shared), (None, true));
        if let (Some(host), Some(free)) = (flex.host, free_host_memory()) {
            assert!(host.abs_diff(free / 4) < free / 16, "a part of {free}: {host}");
        }
    }

    #[test]
    fn the_host_has_to_hold_what_is_offloaded() {
        let cli =
            |flags: &str| Cli::parse_from(["gpt_pretrain"].into_iter().chain(flags.split(' ')));
        let device = DeviceName::Flex.resolve().unwrap();
        let setup = Setup::new(&cli("--cpu-offload --offload-activations")).unwrap();
        let offloaded = forecast(&setup, 2, 2, &device).unwrap();
        assert!(offloaded.host.total() > 0 && offloaded.host.activations == 0, "{offloaded}");
        let [device, host] = [offloaded.total(), offloaded.host.total()];
        let available = |host, shared| AvailableMemory { device: None, host: Some(host), shared };
        assert!(available(host, false).check(&offloaded).is_ok());
        let error = available(host - 1, false).check(&offloaded).unwrap_err();
        assert!(matches!(error, MemoryError::HostDoesNotFit { needed, .. } if needed == host));
        assert!(error.to_string().contains("on the host"), "{error}");
        // Flex computes in host memory.
        assert!(available(device + host, true).check(&offloaded).is_ok());
        assert!(available(device + host - 1, true).check(&offloaded).is_err());
        let unknown = AvailableMemory { device: None, host: None, shared: true };
        assert!(unknown.check(&offloaded).is_ok() && unknown.to_string().contains("not known"));
    }

    #[test]
    fn linux_reports_free_memory() {
        let text = "MemTotal: 8000 kB\nMemFree: 10 kB\nMemAvailable:     7000 kB\nBuffers: 1 kB\n";
        assert_eq!(parse_meminfo(text), Some(7000 * 1024));
        assert_eq!(parse_meminfo("MemTotal: 8000 kB\n"), None);
        if cfg!(target_os = "linux") {
            assert!(free_host_memory().unwrap() > 1 << 20);
        }
    }
}
