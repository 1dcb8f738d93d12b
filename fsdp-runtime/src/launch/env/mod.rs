//! The environment variables that say which rank this process is.
//!
//! `fsdp launch` and torchrun, Open MPI's `mpirun`, and Slurm's `srun` set them. This module only
//! reads them; [`launch`](crate::launch()) decides whether ranks may be started in such an
//! environment.

mod error;
#[cfg(test)]
mod tests;
mod variables;

use std::ffi::OsString;
use std::fmt;

pub use self::error::EnvError;
use self::variables::{OPEN_MPI, SLURM, TORCHRUN, Variables};
use crate::layout::{Rank, WorldSize};

/// Exit code of a rank that ended only because another rank had failed.
///
/// `fsdp launch` then looks for the cause among the other ranks. With another exit code, `fsdp
/// launch` finds the cause by the order in which ranks ended.
pub const EXIT_PEER_FAILED: i32 = 75;

/// Exit code of a rank that was refused its input: its arguments, its configuration, or a
/// checkpoint of another model.
///
/// A restart would fail in the same way, so `fsdp launch --max-restarts` does not restart the ranks.
pub const EXIT_REFUSED: i32 = 78;

/// The program that started this process as a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// `fsdp launch`, torchrun, or another program that sets `RANK`.
    Torchrun,
    /// Open MPI's `mpirun`, which sets `OMPI_COMM_WORLD_RANK`.
    OpenMpi,
    /// Slurm's `srun`, which sets `SLURM_PROCID`.
    Slurm,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Torchrun => "`fsdp launch` or torchrun",
            Self::OpenMpi => "Open MPI's `mpirun`",
            Self::Slurm => "Slurm's `srun`",
        })
    }
}

/// The rank of this process, as the environment variables of its launcher say.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankEnv {
    /// Rank of this process.
    pub rank: Rank,
    /// Number of ranks on all machines.
    pub world: WorldSize,
    /// Number of this rank among the ranks of one machine, counted from 0.
    pub local_rank: usize,
    /// Number of ranks on this machine; `None` if the launcher does not set it.
    pub local_world: Option<usize>,
    /// Launcher whose variables were used.
    pub launcher: Launcher,
    /// Address of rank 0, from `MASTER_ADDR` and `MASTER_PORT`; `None` if they are not set. MPI
    /// does not need it.
    pub main_process: Option<MainProcess>,
}

/// The address at which the other ranks reach rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MainProcess {
    /// Name or address of the host.
    pub host: String,
    /// TCP port, 1 to 65535.
    pub port: u16,
}

impl RankEnv {
    /// Reads the environment variables of this process. Returns `None` if no launcher has started
    /// the process as a rank.
    ///
    /// Variables of torchrun and of `mpirun` take precedence over Slurm's: under `srun torchrun`,
    /// Slurm's variables describe torchrun and not the ranks.
    ///
    /// # Errors
    ///
    /// [`EnvError`] names a variable that is missing, out of range, or contradicted by another
    /// variable.
    pub fn read() -> Result<Option<Self>, EnvError> {
        Self::from_variables(|name| std::env::var_os(name))
    }

    /// Reads variables from a function that returns the value of a variable. Otherwise it works as
    /// [`read`](Self::read) does.
    ///
    /// # Errors
    ///
    /// The errors of [`read`](Self::read).
    pub fn from_variables(
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Option<Self>, EnvError> {
        let variables = Variables(&variable);
        let torchrun = variables.rank_env(&TORCHRUN)?;
        let open_mpi = variables.rank_env(&OPEN_MPI)?;
        if let (Some(first), Some(second)) = (&torchrun, &open_mpi)
            && (first.rank, first.world) != (second.rank, second.world)
        {
            return Err(EnvError::StartedTwice {
                first: first.launcher,
                first_rank: first.rank,
                first_world: first.world,
                second: second.launcher,
                second_rank: second.rank,
                second_world: second.world,
            });
        }
        let env = match torchrun.or(open_mpi) {
            Some(env) => Some(env),
            None => variables.rank_env(&SLURM)?,
        };
        let main_process = variables.main_process();
        env.map(|env| Ok(Self { main_process: main_process?, ..env })).transpose()
    }

    /// Compares the world size with the `num_processes` of a configuration file.
    ///
    /// The check is for launchers that do not read the file. `fsdp launch` reads it, and its flags
    /// override the file.
    ///
    /// # Errors
    ///
    /// [`EnvError::WorldDiffers`] if the numbers differ.
    pub fn check(&self, num_processes: Option<usize>) -> Result<(), EnvError> {
        match num_processes {
            Some(configured) if configured != self.world.size() => Err(EnvError::WorldDiffers {
                configured,
                started: self.world.size(),
                launcher: self.launcher,
            }),
            _ => Ok(()),
        }
    }
}
