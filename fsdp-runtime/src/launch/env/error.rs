//! Errors of the environment variables of a rank.

use super::Launcher;
use crate::layout::{Rank, WorldSize};

/// Environment variables that do not say which rank this process is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EnvError {
    /// A launcher's variable that is not set, although others are.
    #[error(
        "`{present}` is set, but `{missing}` is not; start the program with {launcher}, or unset `{present}`"
    )]
    Missing {
        /// Name of the variable that is not set.
        missing: &'static str,
        /// Name of a variable that is set.
        present: &'static str,
        /// Launcher that sets both variables.
        launcher: Launcher,
    },
    /// A variable that is not a number in the expected range.
    #[error("`{variable}` is `{value}`; expected {expected}")]
    NotANumber {
        /// Name of the variable.
        variable: &'static str,
        /// Value of the variable.
        value: String,
        /// Description of the expected values.
        expected: &'static str,
    },
    /// A rank that is not below the world size.
    #[error("`{variable}` is {rank}, but `{world_variable}` is {world}; ranks count from 0")]
    RankOutOfWorld {
        /// Name of the variable with the rank.
        variable: &'static str,
        /// Value of the rank's variable.
        rank: usize,
        /// Name of the variable with the world size.
        world_variable: &'static str,
        /// Value of the world size's variable.
        world: usize,
    },
    /// Two launchers that give this process different ranks, because one has started the other.
    #[error(
        "the ranks were started twice: {first} says rank {first_rank} of {first_world}, \
         {second} says rank {second_rank} of {second_world}; start them with one of the two"
    )]
    StartedTwice {
        /// First of the two launchers.
        first: Launcher,
        /// Rank that the first launcher gives this process.
        first_rank: Rank,
        /// Number of ranks that the first launcher has started.
        first_world: WorldSize,
        /// Second of the two launchers.
        second: Launcher,
        /// Rank that the second launcher gives this process.
        second_rank: Rank,
        /// Number of ranks that the second launcher has started.
        second_world: WorldSize,
    },
    /// A configuration file for another number of processes.
    #[error(
        "the configuration file says `num_processes: {configured}`, but {launcher} has started \
         {started}; start {configured}, or change the file"
    )]
    WorldDiffers {
        /// Number of processes in the file.
        configured: usize,
        /// Number of processes that were started.
        started: usize,
        /// Launcher that has started the processes.
        launcher: Launcher,
    },
}
