//! What memory the run will need, and what there is.

use std::{fmt, fs};

use anyhow::{Context, Result};
use burn::tensor::{DType, Device};
use fsdp_runtime::{MemoryError, MemoryForecast, Mesh, WorldSize};

use crate::arch::Kept;
use crate::cli::Cli;
use crate::device::DeviceName;
use crate::train::{ADAM_MOMENTS, Job};

/// What the rank that needs the most will hold, from the model's shapes alone.
///
/// # Errors
///
/// If the model cannot be sharded as the job asks.
pub fn forecast(job: &Job, world_size: usize, device: &Device) -> Result<MemoryForecast> {
    let model = job.model(device);
    let world = WorldSize::new(world_size)?;
    let mut largest: Option<MemoryForecast> = None;
    for rank in world.ranks() {
        let of_rank = MemoryForecast::new(&model, Mesh::new(rank, world), &job.options())?;
        let larger = largest.is_none_or(|largest| largest.total() < of_rank.total());
        largest = if larger { Some(of_rank) } else { largest };
    }
    let recipe = &job.recipe;
    let element_size = DType::from(recipe.precision.dtype()).size();
    let kept = Kept { element_size, blocks: recipe.kept_blocks };
    let (rows, length) = (recipe.batch_size, recipe.tokens_per_sample);
    let activations = job.arch.activation_bytes(rows, length, kept);
    let forecast = largest.context("no rank")?.with_optimizer(ADAM_MOMENTS);
    let forecast = if recipe.update_freq > 1 { forecast.with_accumulation() } else { forecast };
    Ok(forecast.with_activations(activations))
}

/// Bytes that a rank may use.
#[derive(Clone, Copy, Debug)]
pub enum Room {
    /// What `--memory-limit` says.
    Limit(usize),
    /// Its part of what the machine has free: ranks are threads of one process.
    OnHost {
        /// Bytes that are free.
        free: usize,
        /// How many share them.
        ranks: usize,
    },
    /// Not known: a device with memory of its own, or a system that does not tell.
    Unknown,
}

impl Room {
    /// The room of each rank of a run.
    pub fn of(cli: &Cli) -> Self {
        let on_host = match cli.device {
            DeviceName::Flex | DeviceName::Cpu => true,
            DeviceName::Auto => !cfg!(feature = "cuda"),
            DeviceName::Wgpu | DeviceName::Cuda(_) => false,
        };
        match (cli.memory_limit, free_bytes()) {
            (Some(limit), _) => Self::Limit(limit),
            (None, Some(free)) if on_host => Self::OnHost { free, ranks: cli.world_size() },
            _ => Self::Unknown,
        }
    }

    /// The bytes, where they are known.
    pub fn bytes(self) -> Option<usize> {
        match self {
            Self::Limit(limit) => Some(limit),
            Self::OnHost { free, ranks } => Some(free / ranks),
            Self::Unknown => None,
        }
    }

    /// Whether the forecast fits; so it does where nothing is known.
    ///
    /// # Errors
    ///
    /// [`MemoryError`] with the table, where it does not.
    pub fn check(self, forecast: &MemoryForecast) -> Result<(), MemoryError> {
        self.bytes().map_or(Ok(()), |bytes| forecast.check(bytes))
    }
}

impl fmt::Display for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
        match *self {
            Self::Limit(limit) => write!(f, "a rank may use {:.2} GiB", gib(limit)),
            Self::OnHost { free, ranks } => {
                write!(f, "{:.2} GiB free on the host for {ranks} ranks", gib(free))
            }
            Self::Unknown => f.write_str("what there is is not known"),
        }
    }
}

/// Memory of the machine that is free, or of the control group the process is in where that is less;
/// `None` on systems that are not Linux.
pub fn free_bytes() -> Option<usize> {
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

    #[test]
    fn a_limit_goes_before_what_is_free() {
        let room = |flags: &str| {
            Room::of(&Cli::parse_from(std::iter::once("gpt_pretrain").chain(flags.split(' '))))
        };
        let four = 4 << 30;
        assert_eq!(room("--device flex --memory-limit 4GiB").bytes(), Some(four));
        assert_eq!(room("--device cuda --memory-limit 4GiB").bytes(), Some(four));
        assert_eq!(room("--device cuda").bytes(), None);
        if let Room::OnHost { ranks, .. } = room("--device flex --world-size 4") {
            assert_eq!(ranks, 4);
        }
        assert_eq!(Room::OnHost { free: 1 << 20, ranks: 4 }.bytes(), Some(1 << 18));
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
