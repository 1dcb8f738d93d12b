//! Shard groups: how `parallelism_config` divides the ranks.

use super::error::{Problem, ProblemKind};
use super::types::Config;

impl Config {
    /// Returns the number of ranks in a shard group; `None` if the file does not divide the ranks. Parameters are
    /// sharded over `dp_shard_size x cp_size` ranks, as in Accelerate.
    pub(super) fn shard_size(&self) -> Option<usize> {
        let groups = self.fsdp.replicate.filter(|groups| *groups > 1);
        let [context, tensor] = self.split_sizes().map(|(_, size)| size.unwrap_or(1));
        let shard = self.fsdp.shard.map(|shard| shard * context);
        shard.or_else(|| Some(self.num_processes? / tensor / groups?))
    }

    /// Returns the numbers of ranks that have parts of the same rows, and of the same matrices.
    fn split_sizes(&self) -> [(&'static str, Option<usize>); 2] {
        [("cp_size", self.fsdp.context), ("tp_size", self.fsdp.tensor)]
    }

    /// Returns a problem if the ranks cannot be divided into the groups that the file asks for.
    pub(super) fn shard_group_problem(&self) -> Option<Problem> {
        let (groups, world) = (self.fsdp.replicate.unwrap_or(1), self.num_processes?);
        let (mut names, mut sizes, mut split) = (String::new(), String::new(), 1);
        for (name, size) in self.split_sizes() {
            let Some(size) = size else { continue };
            names += &format!(" x {name}");
            sizes += &format!(" x {size}");
            split *= size;
        }
        let expected = match self.fsdp.shard {
            Some(shard) if groups * shard * split != world => format!(
                "dp_replicate_size x dp_shard_size{names} of `parallelism_config`, {groups} x \
                 {shard}{sizes}"
            ),
            None if groups * split > 1 && !world.is_multiple_of(groups * split) => format!(
                "a multiple of dp_replicate_size{names} of `parallelism_config`, {groups}{sizes}"
            ),
            _ => return None,
        };
        let (key, value) = ("num_processes".into(), world.to_string());
        let kind = ProblemKind::WrongValue { key, value, expected };
        Some(Problem { place: self.source.place("num_processes"), kind })
    }
}
