//! The environment variables that say which rank this process is.
//!
//! `fsdp launch` and torchrun, Open MPI's `mpirun`, and Slurm's `srun` set them. This module only
//! reads them; [`launch`](crate::launch) decides whether ranks may be started in such an
//! environment.

use std::ffi::OsString;
use std::fmt;

use crate::layout::{Rank, WorldSize};

/// Exit code of a rank that ended only because another rank had failed.
///
/// `fsdp launch` then looks for the cause among the other ranks. With another exit code, `fsdp
/// launch` finds the cause by the order in which ranks ended.
pub const EXIT_PEER_FAILED: i32 = 75;

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

/// The names of a launcher's environment variables.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    /// Variables of the world size. The first one that is set is used.
    world: &'static [&'static str],
    local_rank: &'static str,
    local_world: &'static str,
}

const TORCHRUN: Names = Names {
    launcher: Launcher::Torchrun,
    rank: "RANK",
    world: &["WORLD_SIZE"],
    local_rank: "LOCAL_RANK",
    local_world: "LOCAL_WORLD_SIZE",
};
const OPEN_MPI: Names = Names {
    launcher: Launcher::OpenMpi,
    rank: "OMPI_COMM_WORLD_RANK",
    world: &["OMPI_COMM_WORLD_SIZE"],
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_world: "OMPI_COMM_WORLD_LOCAL_SIZE",
};
// SLURM_NTASKS is the number of tasks of the job; a step of the job may have fewer.
const SLURM: Names = Names {
    launcher: Launcher::Slurm,
    rank: "SLURM_PROCID",
    world: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
    local_rank: "SLURM_LOCALID",
    local_world: "SLURM_STEP_TASKS_PER_NODE",
};

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

/// The environment variables of a process. An empty variable counts as not set.
struct Variables<'a, F>(&'a F);

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
    fn rank_env(&self, names: &Names) -> Result<Option<RankEnv>, EnvError> {
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
    fn main_process(&self) -> Result<Option<MainProcess>, EnvError> {
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
fn tasks(text: &str) -> Option<usize> {
    let (tasks, machines) = text.split_once('(').unwrap_or((text, ""));
    if machines.contains(',') {
        return None;
    }
    tasks.parse().ok().filter(|tasks| *tasks > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<RankEnv>, EnvError> {
        RankEnv::from_variables(|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
        })
    }

    const TORCH: [(&str, &str); 5] = [
        ("RANK", "3"),
        ("LOCAL_RANK", "1"),
        ("WORLD_SIZE", "4"),
        ("MASTER_ADDR", "node0"),
        ("MASTER_PORT", "29500"),
    ];

    #[test]
    fn the_variables_of_each_launcher_are_read() {
        let torchrun = read(&TORCH).unwrap().unwrap();
        assert_eq!((torchrun.rank.index(), torchrun.world.size(), torchrun.local_rank), (3, 4, 1));
        assert_eq!(torchrun.main_process, Some(MainProcess { host: "node0".into(), port: 29500 }));

        let mpi = read(&[
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        ]);
        let mpi = mpi.unwrap().unwrap();
        assert_eq!(
            (mpi.rank.index(), mpi.launcher, mpi.main_process),
            (1, Launcher::OpenMpi, None)
        );

        let slurm = read(&[
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "64"),
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_TASKS_PER_NODE", "4(x2)"),
        ]);
        let slurm = slurm.unwrap().unwrap();
        assert_eq!((slurm.rank.index(), slurm.world.size()), (5, 8));
        assert_eq!((slurm.launcher, slurm.local_world), (Launcher::Slurm, Some(4)));
        assert_eq!(
            (tasks("2"), tasks("4(x2),1"), tasks("2,1"), tasks("0")),
            (Some(2), None, None, None)
        );

        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[("SLURM_NTASKS", "8")]), Ok(None), "a batch script is not a rank");
    }

    #[test]
    fn torchrun_under_slurm_is_not_an_error() {
        let mut variables = TORCH.to_vec();
        variables.extend([("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_LOCALID", "0")]);
        assert_eq!(read(&variables).unwrap().unwrap().rank.index(), 3);
    }

    #[test]
    fn torchrun_under_mpirun_is_an_error() {
        let mut variables = TORCH.to_vec();
        variables.extend([
            ("OMPI_COMM_WORLD_RANK", "0"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        ]);
        let text = read(&variables).unwrap_err().to_string();
        assert!(text.contains("started twice") && text.contains("rank 3 of 4"), "{text}");
        variables[5].1 = "3";
        assert!(read(&variables).is_ok(), "the two agree");
    }

    #[test]
    fn errors_name_the_wrong_variable() {
        let change = |name: &str, value: &'static str| {
            let mut variables = TORCH.to_vec();
            for variable in &mut variables {
                if variable.0 == name {
                    variable.1 = value;
                }
            }
            read(&variables).unwrap_err()
        };
        for (name, _) in TORCH {
            let error = change(name, "");
            assert!(
                matches!(error, EnvError::Missing { missing, .. } if missing == name),
                "{error}"
            );
            if name != "MASTER_ADDR" {
                let error = change(name, "x1");
                let EnvError::NotANumber { variable, .. } = &error else { panic!("{error}") };
                assert_eq!(*variable, name);
                assert!(error.to_string().contains("`x1`"), "{error}");
            }
        }
        assert!(matches!(change("RANK", "4"), EnvError::RankOutOfWorld { rank: 4, .. }));
        assert!(matches!(change("RANK", "-1"), EnvError::NotANumber { variable: "RANK", .. }));
        assert!(matches!(change("WORLD_SIZE", "0"), EnvError::RankOutOfWorld { world: 0, .. }));
        assert!(matches!(change("MASTER_PORT", "70000"), EnvError::NotANumber { .. }));
    }

    #[test]
    fn a_file_with_another_world_size_is_an_error() {
        let env = read(&TORCH).unwrap().unwrap();
        assert_eq!(env.check(None), Ok(()));
        let text = env.check(Some(2)).unwrap_err().to_string();
        assert!(text.contains("num_processes: 2") && text.contains("started 4"), "{text}");
    }
}
