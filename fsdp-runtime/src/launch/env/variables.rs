//! The names and the values of the launchers' environment variables.

use std::ffi::OsString;

use super::{EnvError, Launcher, MainProcess, RankEnv};
use crate::layout::WorldSize;

/// The names of a launcher's environment variables.
pub(super) struct Names {
    launcher: Launcher,
    rank: &'static str,
    /// Variables of the world size. The first one that is set is used.
    world: &'static [&'static str],
    local_rank: &'static str,
    local_world: &'static str,
}

pub(super) const TORCHRUN: Names = Names {
    launcher: Launcher::Torchrun,
    rank: "RANK",
    world: &["WORLD_SIZE"],
    local_rank: "LOCAL_RANK",
    local_world: "LOCAL_WORLD_SIZE",
};
pub(super) const OPEN_MPI: Names = Names {
    launcher: Launcher::OpenMpi,
    rank: "OMPI_COMM_WORLD_RANK",
    world: &["OMPI_COMM_WORLD_SIZE"],
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_world: "OMPI_COMM_WORLD_LOCAL_SIZE",
};
// SLURM_NTASKS is the number of tasks of the job; a step of the job may have fewer.
pub(super) const SLURM: Names = Names {
    launcher: Launcher::Slurm,
    rank: "SLURM_PROCID",
    world: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
    local_rank: "SLURM_LOCALID",
    local_world: "SLURM_STEP_TASKS_PER_NODE",
};

/// The environment variables of a process. An empty variable counts as not set.
pub(super) struct Variables<'a, F>(pub(super) &'a F);

impl<F: Fn(&str) -> Option<OsString>> Variables<'_, F> {
    fn get(&self, name: &str) -> Option<String> {
        let value = (self.0)(name)?.to_string_lossy().trim().to_string();
        (!value.is_empty()).then_some(value)
    }

    fn number(
        &self,
        variable: &'static str,
        expected: &'static str,
    ) -> Result<Option<usize>, EnvError> {
        let number = |value: String| {
            let parsed = value.parse::<usize>();
            parsed.map_err(|_| EnvError::NotANumber { variable, value, expected })
        };
        self.get(variable).map(number).transpose()
    }

    /// Returns the rank that a launcher's variables describe; `None` if none of them is set.
    pub(super) fn rank_env(&self, names: &Names) -> Result<Option<RankEnv>, EnvError> {
        const FROM_0: &str = "a whole number from 0";
        let world_name = *names
            .world
            .iter()
            .find(|name| self.get(name).is_some())
            .unwrap_or(&names.world[names.world.len() - 1]);
        let rank = self.number(names.rank, FROM_0)?;
        let world = self.number(world_name, "a whole number from 1")?;
        let local_rank = self.number(names.local_rank, FROM_0)?;
        let launcher = names.launcher;
        let missing = |missing, present| EnvError::Missing { missing, present, launcher };
        let (rank, world) = match (rank, world) {
            (Some(rank), Some(world)) => (rank, world),
            (Some(_), None) => return Err(missing(world_name, names.rank)),
            // A batch script of Slurm has a number of tasks, but is not a rank.
            (None, Some(_)) if launcher != Launcher::Slurm => {
                return Err(missing(names.rank, world_name));
            }
            (None, _) => return Ok(None),
        };
        let local_rank = local_rank.ok_or_else(|| missing(names.local_rank, names.rank))?;
        let outside = EnvError::RankOutOfWorld {
            variable: names.rank,
            rank,
            world_variable: world_name,
            world,
        };
        let world_size = WorldSize::new(world).map_err(|_| outside.clone())?;
        let rank = world_size.rank(rank).ok_or(outside)?;
        let local_world = self.get(names.local_world).as_deref().and_then(tasks);
        Ok(Some(RankEnv {
            rank,
            world: world_size,
            local_rank,
            local_world,
            launcher,
            main_process: None,
        }))
    }

    /// Returns the address of rank 0; `None` if its variables are not set.
    pub(super) fn main_process(&self) -> Result<Option<MainProcess>, EnvError> {
        const HOST: &str = "MASTER_ADDR";
        const PORT: &str = "MASTER_PORT";
        let launcher = Launcher::Torchrun;
        match (self.get(HOST), self.get(PORT)) {
            (None, None) => Ok(None),
            (Some(_), None) => Err(EnvError::Missing { missing: PORT, present: HOST, launcher }),
            (None, Some(_)) => Err(EnvError::Missing { missing: HOST, present: PORT, launcher }),
            (Some(host), Some(value)) => match value.parse() {
                Ok(port) if port != 0 => Ok(Some(MainProcess { host, port })),
                _ => Err(EnvError::NotANumber {
                    variable: PORT,
                    value,
                    expected: "a port, 1 to 65535",
                }),
            },
        }
    }
}

/// Parses the number of tasks on this machine: `4`, or Slurm's `4(x2)` for two machines with four
/// tasks each.
///
/// Returns `None` for a list with commas, which Slurm writes for machines with different numbers of
/// tasks: the list does not say which entry is for this machine.
pub(super) fn tasks(text: &str) -> Option<usize> {
    let (tasks, machines) = text.split_once('(').unwrap_or((text, ""));
    if machines.contains(',') {
        return None;
    }
    tasks.parse().ok().filter(|tasks| *tasks > 0)
}
