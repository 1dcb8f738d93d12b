//! Shard groups: how `parallelism_config` divides the ranks.

use super::error::{Problem, ProblemKind};
use super::types::Config;

impl Config {
    /// Returns the number of ranks in a shard group; `None` if the file does not divide the ranks.
    pub(super) fn shard_size(&self) -> Option<usize> {
        let groups = self.fsdp.replicate.filter(|groups| *groups > 1);
        let tensor = self.fsdp.tensor.unwrap_or(1);
        self.fsdp.shard.or_else(|| Some(self.num_processes? / tensor / groups?))
    }

    /// Returns a problem if the ranks cannot be divided into the groups that the file asks for.
    pub(super) fn shard_group_problem(&self) -> Option<Problem> {
        let (groups, world) = (self.fsdp.replicate.unwrap_or(1), self.num_processes?);
        let tensor = self.fsdp.tensor.unwrap_or(1);
        let expected = match self.fsdp.shard {
            Some(shard) if groups * shard * tensor != world => {
                let (names, sizes) = match self.fsdp.tensor {
                    Some(tensor) => (" x tp_size", format!(" x {tensor}")),
                    None => ("", String::new()),
                };
                format!(
                    "dp_replicate_size x dp_shard_size{names} of `parallelism_config`, {groups} x \
                     {shard}{sizes}"
                )
            }
            None if groups * tensor > 1 && !world.is_multiple_of(groups * tensor) => match tensor {
                1 => format!("a multiple of dp_replicate_size of `parallelism_config`, {groups}"),
                _ => format!(
                    "a multiple of dp_replicate_size x tp_size of `parallelism_config`, {groups} x \
                         {tensor}"
                ),
            },
            _ => return None,
        };
        let (key, value) = ("num_processes".into(), world.to_string());
        let kind = ProblemKind::WrongValue { key, value, expected };
        Some(Problem { place: self.source.place("num_processes"), kind })
    }
}
