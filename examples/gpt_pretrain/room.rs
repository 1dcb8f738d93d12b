//! What memory the run will need, and what there is.

use std::fmt;

use anyhow::{Context, Result};
use burn::tensor::Device;
use fsdp_runtime::{MemoryError, MemoryForecast, Mesh, WorldSize};
use sysinfo::System;

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
    let activations = job.arch.activation_bytes(recipe.batch_size, recipe.tokens_per_sample);
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
    /// Not known: a device of its own memory, without a limit.
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
        match cli.memory_limit {
            Some(limit) => Self::Limit(limit),
            None if on_host => Self::OnHost { free: free_bytes(), ranks: cli.world_size },
            None => Self::Unknown,
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
            Self::Unknown => f.write_str("the device's memory is not known"),
        }
    }
}

/// Memory of the machine that is free, or of the control group the process is in where that is less.
pub fn free_bytes() -> usize {
    let mut system = System::new();
    system.refresh_memory();
    let free = system.available_memory();
    let free = system.cgroup_limits().map_or(free, |group| free.min(group.free_memory));
    usize::try_from(free).unwrap_or(usize::MAX)
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
        let (one, four) = (room("--device flex --world-size 1"), room("--device flex --world-size 4"));
        let (one, four) = (one.bytes().unwrap(), four.bytes().unwrap());
        assert!(one > 2 * four && four > 1 << 20, "{one} {four}");
    }
}
