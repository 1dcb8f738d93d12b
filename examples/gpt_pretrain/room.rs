//! What memory the run will need, and what there is.

use std::{fmt, fs};

use anyhow::{Context, Result};
use burn::tensor::{DType, Device};
use fsdp_runtime::{MemoryError, MemoryForecast, Mesh, WorldSize};

use crate::arch::{Kept, KeptBlocks};
use crate::cli::Cli;
use crate::device::DeviceName;
use crate::train::{ADAM_MOMENTS, Setup};

/// What the rank that needs the most will hold, from the model's shapes alone. Of the ranks `local`
/// are on this machine.
///
/// # Errors
///
/// If the model cannot be sharded as the setup asks.
pub fn forecast(
    setup: &Setup,
    world_size: usize,
    local: usize,
    device: &Device,
) -> Result<MemoryForecast> {
    let model = setup.model(device);
    let world = WorldSize::new(world_size)?;
    // What the hybrid strategies take for the size of a group.
    let options = setup.options().with_shard_size(local);
    let mut largest: Option<MemoryForecast> = None;
    for rank in world.ranks() {
        let of_rank = MemoryForecast::new(&model, Mesh::new(rank, world), &options)?;
        let larger = largest.is_none_or(|largest| largest.total() < of_rank.total());
        largest = if larger { Some(of_rank) } else { largest };
    }
    let recipe = &setup.recipe;
    let element_size = DType::from(recipe.precision.dtype()).size();
    let blocks = match recipe.kept_blocks {
        // The host is the device, and nothing goes anywhere.
        KeptBlocks::OnHost if is_flex(device) => KeptBlocks::Inputs,
        blocks => blocks,
    };
    let kept = Kept { element_size, blocks };
    let (rows, length) = (recipe.batch_size, recipe.tokens_per_sample);
    let (on_device, on_host) = setup.arch.activation_bytes(rows, length, kept);
    let forecast = largest.context("no rank")?.with_optimizer(ADAM_MOMENTS);
    let forecast = if recipe.update_freq > 1 { forecast.with_accumulation() } else { forecast };
    Ok(forecast.with_activations(on_device).with_host_activations(on_host))
}

fn is_flex(device: &Device) -> bool {
    #[cfg(feature = "flex")]
    return *device == Device::flex();
    #[cfg(not(feature = "flex"))]
    {
        let _ = device;
        false
    }
}

/// Bytes that a rank may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Of its device: what `--memory-limit` says, or what the device has; `None` where that is not
    /// known, or the device has no memory of its own.
    device: Option<usize>,
    /// Of the host: its part of what is free there; `None` on a system that does not tell.
    host: Option<usize>,
    /// Whether what the device holds lies in the host's part.
    shared: bool,
}

impl Room {
    /// The room of each rank of a run, of which so many are on this machine: threads of this process, or
    /// processes that each have a GPU, if there are any.
    pub fn of(cli: &Cli, ranks: usize, threads: bool) -> Self {
        let sharing = if threads { ranks } else { 1 };
        let on_host = match cli.device {
            DeviceName::Flex | DeviceName::Cpu => true,
            DeviceName::Auto => !cfg!(feature = "cuda"),
            DeviceName::Wgpu | DeviceName::Cuda(_) => false,
        };
        Self {
            device: cli.memory_limit.or_else(|| gpu_bytes(cli.device, sharing)),
            host: free_bytes().map(|free| free / ranks),
            shared: on_host && cli.memory_limit.is_none(),
        }
    }

    /// Whether the forecast fits; so it does where nothing is known.
    ///
    /// # Errors
    ///
    /// [`MemoryError`] with the table, where it does not.
    pub fn check(self, forecast: &MemoryForecast) -> Result<(), MemoryError> {
        self.device.map_or(Ok(()), |bytes| forecast.check(bytes))?;
        self.host.map_or(Ok(()), |bytes| forecast.check_host(bytes, self.shared))
    }
}

impl fmt::Display for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: usize| format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30));
        let parts = [(self.device, "of its device"), (self.host, "of the host")];
        let known = parts.into_iter().filter_map(|(bytes, of)| Some((gib(bytes?), of)));
        let known: Vec<String> = known.map(|(bytes, of)| format!("{bytes} {of}")).collect();
        match known.as_slice() {
            [] => f.write_str("what there is is not known"),
            known => write!(f, "a rank may use {}", known.join(" and ")),
        }
    }
}

/// Memory of a GPU for each of so many ranks, which share the GPUs from the one named on.
#[cfg(feature = "cuda")]
fn gpu_bytes(device: DeviceName, ranks: usize) -> Option<usize> {
    let first = match device {
        DeviceName::Auto => 0,
        DeviceName::Cuda(first) => first,
        _ => return None,
    };
    let gpus = fsdp_runtime::cuda::driver().ok()?.gpus;
    let gpus = gpus.get(first..)?;
    let least = gpus.iter().take(ranks).map(|gpu| gpu.memory).min()?;
    Some(least / ranks.div_ceil(gpus.len()))
}

#[cfg(not(feature = "cuda"))]
fn gpu_bytes(_: DeviceName, _: usize) -> Option<usize> {
    None
}

/// Memory of a GPU that Burn has not reserved, as fairseq counts what is free there; of the machine for
/// any other device.
pub fn free_on(device: &Device) -> Option<usize> {
    #[cfg(feature = "cuda")]
    if let Some(index) = fsdp_runtime::cuda::index_of(device) {
        let gpus = fsdp_runtime::cuda::driver().ok()?.gpus;
        let reserved = fsdp_runtime::DeviceUsage::of(device)?.reserved;
        return Some(gpus.get(index)?.memory.saturating_sub(reserved));
    }
    let _ = device;
    free_bytes()
}

/// Memory of the machine that is free, or of the control group the process is in where that is less;
/// `None` on systems that are not Linux.
fn free_bytes() -> Option<usize> {
    let free = from_meminfo(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let of_group = |name: &str| -> Option<usize> {
        fs::read_to_string(format!("/sys/fs/cgroup/memory.{name}")).ok()?.trim().parse().ok()
    };
    let in_group = of_group("max").zip(of_group("current"));
    Some(in_group.map_or(free, |(max, used)| free.min(max.saturating_sub(used))))
}

/// The bytes that Linux says a program can have without swapping.
fn from_meminfo(text: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn room(flags: &str) -> Room {
        Room::of(&Cli::parse_from(std::iter::once("gpt_pretrain").chain(flags.split(' '))), 4, true)
    }

    #[test]
    fn a_limit_goes_before_what_is_free() {
        let four = 4 << 30;
        for device in ["flex", "cuda", "wgpu"] {
            let limited = room(&format!("--device {device} --memory-limit 4GiB"));
            assert_eq!((limited.device, limited.shared), (Some(four), false));
        }
        assert_eq!(room("--device wgpu").device, None);
        let flex = room("--device flex");
        assert_eq!((flex.device, flex.shared), (None, true));
        if let (Some(host), Some(free)) = (flex.host, free_bytes()) {
            assert!(host.abs_diff(free / 4) < free / 16, "a part of {free}: {host}");
        }
    }

    #[test]
    fn the_host_has_to_hold_what_rests_there() {
        let cli =
            |flags: &str| Cli::parse_from(["gpt_pretrain"].into_iter().chain(flags.split(' ')));
        let device = DeviceName::Flex.resolve().unwrap();
        let setup = cli("--cpu-offload --offload-activations").setup();
        let offloaded = forecast(&setup, 2, 2, &device).unwrap();
        assert!(offloaded.host.total() > 0 && offloaded.host.activations == 0, "{offloaded}");
        let [device, host] = [offloaded.total(), offloaded.host.total()];
        let room = |host, shared| Room { device: None, host: Some(host), shared };
        assert!(room(host, false).check(&offloaded).is_ok());
        let error = room(host - 1, false).check(&offloaded).unwrap_err();
        assert!(matches!(error, MemoryError::HostDoesNotFit { needed, .. } if needed == host));
        assert!(error.to_string().contains("on the host"), "{error}");
        // On Flex both parts are of one memory.
        assert!(room(device + host, true).check(&offloaded).is_ok());
        assert!(room(device + host - 1, true).check(&offloaded).is_err());
        let unknown = Room { device: None, host: None, shared: true };
        assert!(unknown.check(&offloaded).is_ok() && unknown.to_string().contains("not known"));
    }

    /// Two machines of two ranks each: every machine holds the whole model.
    #[test]
    fn the_hybrid_strategies_shard_within_a_machine() {
        let setup =
            |strategy: &str| Cli::parse_from(["gpt_pretrain", "--strategy", strategy]).setup();
        let device = DeviceName::Flex.resolve().unwrap();
        let of = |strategy, world| forecast(&setup(strategy), world, 2, &device).unwrap();
        assert_eq!(of("HYBRID_SHARD", 4).shards, of("FULL_SHARD", 2).shards);
        assert_eq!(of("HYBRID_SHARD", 4).optimizer, of("FULL_SHARD", 2).optimizer);
        assert!(of("FULL_SHARD", 4).shards < of("FULL_SHARD", 2).shards);
    }

    #[test]
    fn linux_says_what_is_free() {
        let text = "MemTotal: 8000 kB\nMemFree: 10 kB\nMemAvailable:     7000 kB\nBuffers: 1 kB\n";
        assert_eq!(from_meminfo(text), Some(7000 * 1024));
        assert_eq!(from_meminfo("MemTotal: 8000 kB\n"), None);
        if cfg!(target_os = "linux") {
            assert!(free_bytes().unwrap() > 1 << 20);
        }
    }
}
