//! Which rank this process is, from the variables of whatever started it: `fsdp launch` and
//! torchrun, Open MPI's `mpirun`, or Slurm's `srun`.
//!
//! Reads only; who may start ranks in such an environment is for the launcher to say.

use std::ffi::OsString;
use std::fmt;

use crate::layout::{Rank, WorldSize};

/// The exit code by which a rank says that it ended only because another had failed: `fsdp launch`
/// then looks for the cause among the others. Any other code is right too, where the order in which
/// ranks ended tells.
pub const EXIT_PEER_FAILED: i32 = 75;

/// What started this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Launcher {
    /// `fsdp launch`, torchrun, or whatever else sets `RANK`.
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// Slurm's `srun`.
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

/// The names under which a launcher tells a process its place.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    /// The first that is set counts.
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
// SLURM_NTASKS is the job's, the other the step's, which may be smaller.
const SLURM: Names = Names {
    launcher: Launcher::Slurm,
    rank: "SLURM_PROCID",
    world: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
    local_rank: "SLURM_LOCALID",
    local_world: "SLURM_STEP_TASKS_PER_NODE",
};

/// This process's place among the ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankEnv {
    /// This rank.
    pub rank: Rank,
    /// The number of ranks.
    pub world: WorldSize,
    /// This rank's number on its machine, counted from 0.
    pub local_rank: usize,
    /// The number of ranks on its machine, where the launcher says it.
    pub local_world: Option<usize>,
    /// What said so.
    pub launcher: Launcher,
    /// `MASTER_ADDR` and `MASTER_PORT`, where ranks can meet; MPI does without.
    pub main_process: Option<MainProcess>,
}

/// Where rank 0 can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MainProcess {
    /// A host's name or address.
    pub host: String,
    /// The port.
    pub port: u16,
}

/// Variables that do not say which rank this is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EnvError {
    /// Some of a launcher's variables are set, but not this one.
    #[error(
        "`{present}` is set, but `{missing}` is not; start the program with {launcher}, or unset `{present}`"
    )]
    Missing {
        /// The variable that is not set.
        missing: &'static str,
        /// One that is.
        present: &'static str,
        /// What sets both.
        launcher: Launcher,
    },
    /// A variable that is no number.
    #[error("`{variable}` is `{value}`; expected {expected}")]
    NotANumber {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What it can be.
        expected: &'static str,
    },
    /// A rank beyond the world.
    #[error("`{variable}` is {rank}, but `{world_variable}` is {world}; ranks count from 0")]
    RankOutOfWorld {
        /// The variable of the rank.
        variable: &'static str,
        /// The rank.
        rank: usize,
        /// The variable of the world size.
        world_variable: &'static str,
        /// The world size.
        world: usize,
    },
    /// Two starters that name different ranks, as when one is started by the other.
    #[error(
        "the ranks were started twice: {first} says rank {first_rank} of {first_world}, \
         {second} says rank {second_rank} of {second_world}; start them with one of the two"
    )]
    StartedTwice {
        /// One launcher.
        first: Launcher,
        /// The rank it names.
        first_rank: Rank,
        /// The ranks it has started.
        first_world: WorldSize,
        /// The other.
        second: Launcher,
        /// The rank it names.
        second_rank: Rank,
        /// The ranks it has started.
        second_world: WorldSize,
    },
    /// A configuration file for another number of processes.
    #[error(
        "the configuration file says `num_processes: {configured}`, but {launcher} has started \
         {started}; start {configured}, or change the file"
    )]
    WorldDiffers {
        /// What the file says.
        configured: usize,
        /// What was started.
        started: usize,
        /// By what.
        launcher: Launcher,
    },
}

impl RankEnv {
    /// Reads the variables of this process; `None` if nothing has started it as a rank.
    ///
    /// `RANK` counts before Slurm's variables, which `srun torchrun` sets for the launcher, and
    /// `mpirun`'s before Slurm's for the same reason.
    ///
    /// # Errors
    ///
    /// [`EnvError`] names the variable that is missing, no number, or contradicted by another.
    pub fn read() -> Result<Option<Self>, EnvError> {
        Self::from_variables(|name| std::env::var_os(name))
    }

    /// As [`read`](Self::read), from any variables.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn from_variables(
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Option<Self>, EnvError> {
        let variables = Variables(&variable);
        let torchrun = variables.place(&TORCHRUN)?;
        let open_mpi = variables.place(&OPEN_MPI)?;
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
        let place = match torchrun.or(open_mpi) {
            Some(place) => Some(place),
            None => variables.place(&SLURM)?,
        };
        let main_process = variables.main_process();
        place.map(|place| Ok(Self { main_process: main_process?, ..place })).transpose()
    }

    /// Compares the world with the `num_processes` of a configuration file. `fsdp launch` has settled the two
    /// already, as its flags override the file, so this is for other starters.
    ///
    /// # Errors
    ///
    /// [`EnvError::WorldDiffers`].
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

/// The variables of a process. One that is empty is not set.
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

    /// What a launcher's variables say; `None` if it has set none of them.
    fn place(&self, names: &Names) -> Result<Option<RankEnv>, EnvError> {
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
            // A batch script's job has a size as well, without being a rank of it.
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
        let rank = world_size.ranks().nth(rank).ok_or(outside)?;
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

/// `4`, or Slurm's `4(x2)` for two machines of four tasks. Machines that differ are written with
/// commas; which of them this one is, the text does not say.
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
    fn each_starter_is_understood() {
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
        assert_eq!(read(&[("SLURM_NTASKS", "8")]), Ok(None), "a batch script is no rank");
    }

    #[test]
    fn torchrun_under_slurm_is_not_started_twice() {
        let mut variables = TORCH.to_vec();
        variables.extend([("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_LOCALID", "0")]);
        assert_eq!(read(&variables).unwrap().unwrap().rank.index(), 3);
    }

    #[test]
    fn torchrun_under_mpirun_is_started_twice() {
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
    fn every_wrong_variable_is_named() {
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
    fn a_file_for_another_world_is_an_error() {
        let place = read(&TORCH).unwrap().unwrap();
        assert_eq!(place.check(None), Ok(()));
        let text = place.check(Some(2)).unwrap_err().to_string();
        assert!(text.contains("num_processes: 2") && text.contains("started 4"), "{text}");
    }
}
