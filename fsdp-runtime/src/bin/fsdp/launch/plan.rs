//! The plan of a launch: how many ranks run on this machine, and their environment variables.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use fsdp_runtime::config::{CONFIG_VARIABLE, Config, DEBUG_VARIABLE};
use fsdp_runtime::env::{Launcher, RankEnv};

use super::error::LaunchError;
use super::rendezvous;

/// Environment variable with the name of a run, which no other run on this machine has.
pub(super) const RUN_ID: &str = "FSDP_RUN_ID";

// No doc comment: clap would show it as the description of `fsdp launch`. These are the flags that
// decide how many ranks start where. A flag overrides the key of the same name in the file.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct Flags {
    /// Number of ranks on all machines together
    #[arg(long, short = 'n', value_name = "N", alias = "num_processes")]
    pub(super) num_processes: Option<usize>,

    /// Number of machines, each of which runs `fsdp launch`
    #[arg(long, value_name = "N", alias = "num_machines")]
    pub(super) num_machines: Option<usize>,

    /// Number of this machine, counted from 0
    #[arg(long, value_name = "N", alias = "machine_rank")]
    pub(super) machine_rank: Option<usize>,

    /// Host name or address of machine 0
    #[arg(long, value_name = "HOST", alias = "main_process_ip")]
    pub(super) main_process_ip: Option<String>,

    /// Port on machine 0 to which ranks connect; 0 for the one of the file
    #[arg(long, value_name = "PORT", alias = "main_process_port")]
    pub(super) main_process_port: Option<u16>,

    /// Start the ranks of all machines with Open MPI's `mpirun`
    #[arg(long)]
    pub(super) mpi: bool,
}

/// The ranks of this machine and their environment.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    /// Number of ranks on all machines.
    pub(super) world: usize,
    /// Number of ranks on this machine.
    pub(super) local: usize,
    /// First rank of this machine.
    pub(super) first: usize,
    /// Environment variables that have the same value on all ranks of this machine.
    pub(super) variables: Vec<(&'static str, OsString)>,
    /// Arguments of `mpirun`, if it starts the ranks.
    pub(super) mpirun: Option<Mpirun>,
}

/// Arguments of a call of `mpirun`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Mpirun {
    /// File that lists the hosts; `None` for this host, or for the hosts of the batch system.
    pub(super) hostfile: Option<PathBuf>,
}

impl Plan {
    /// Plans a launch. `path` is the file that `config` was read from; `variable` reads the
    /// environment of this process.
    pub(super) fn new(
        flags: &Flags,
        config: &Config,
        path: Option<&Path>,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, LaunchError> {
        let size = Size::new(flags, config)?;
        refuse_nested_launch(size.machines, &variable)?;
        let mpirun = mpirun(flags, config);
        if mpirun.is_some() && size.machine > 0 {
            return Err(LaunchError::MpirunOnce { rank: size.machine });
        }

        let mut variables = vec![(RUN_ID, run_id().into())];
        if let Some(host) = main_process_host(flags, config, size.machines, mpirun.is_some())? {
            let port = flags.main_process_port.filter(|port| *port != 0);
            let port = port.or(config.main_process_port);
            let port = rendezvous::port(port, size.machines, size.machine)?;
            rendezvous::resolve(host, port)?;
            variables.push(("MASTER_ADDR", host.into()));
            variables.push(("MASTER_PORT", port.to_string().into()));
        }
        // `mpirun` sets variables of its own for the sizes. `WORLD_SIZE` without `RANK`, which
        // differs by rank, would be an incomplete set, which `RankEnv` refuses.
        if mpirun.is_none() {
            variables.push(("WORLD_SIZE", size.world.to_string().into()));
            variables.push(("LOCAL_WORLD_SIZE", size.local().to_string().into()));
        }
        variables.extend(config_variables(config, path));
        let (world, local, first) = (size.world, size.local(), size.machine * size.local());
        Ok(Self { world, local, first, variables, mpirun })
    }

    /// Returns the value of a variable that all ranks have in common.
    pub(super) fn variable(&self, name: &str) -> Option<&str> {
        self.variables.iter().find(|(key, _)| *key == name).and_then(|(_, value)| value.to_str())
    }

    /// Returns the number of processes that the launcher starts itself: one for each rank, or one
    /// `mpirun`.
    pub(super) fn processes(&self) -> usize {
        if self.mpirun.is_some() { 1 } else { self.local }
    }
}

/// Number of ranks and machines.
struct Size {
    /// Number of ranks on all machines, a multiple of `machines`.
    world: usize,
    machines: usize,
    /// This machine's number, below `machines`.
    machine: usize,
}

impl Size {
    fn new(flags: &Flags, config: &Config) -> Result<Self, LaunchError> {
        let machines = flags.num_machines.unwrap_or(config.num_machines);
        let machine = flags.machine_rank.unwrap_or(config.machine_rank);
        let world = flags.num_processes.or(config.num_processes).ok_or(LaunchError::NoProcesses)?;
        if world == 0 {
            return Err(LaunchError::Zero { name: "--num-processes" });
        }
        if machines == 0 {
            return Err(LaunchError::Zero { name: "--num-machines" });
        }
        if !world.is_multiple_of(machines) {
            return Err(LaunchError::Uneven { processes: world, machines });
        }
        if machine >= machines {
            return Err(LaunchError::MachineRank { rank: machine, machines });
        }
        Ok(Self { world, machines, machine })
    }

    /// Returns the number of ranks on one machine.
    fn local(&self) -> usize {
        self.world / self.machines
    }
}

/// Returns the arguments of `mpirun`, if it starts the ranks: with the flag `--mpi`, or with a
/// `mpirun_config` in the file.
fn mpirun(flags: &Flags, config: &Config) -> Option<Mpirun> {
    let from_file = config.mpirun.as_ref().map(|file| Mpirun { hostfile: file.hostfile.clone() });
    from_file.or_else(|| flags.mpi.then(Mpirun::default))
}

/// Returns the host of rank 0. `None` for several machines under `mpirun` without a host: MPI
/// connects the ranks by itself.
fn main_process_host<'a>(
    flags: &'a Flags,
    config: &'a Config,
    machines: usize,
    mpirun: bool,
) -> Result<Option<&'a str>, LaunchError> {
    match flags.main_process_ip.as_deref().or(config.main_process_ip.as_deref()) {
        Some(host) => Ok(Some(host)),
        None if machines == 1 => Ok(Some("127.0.0.1")),
        None if mpirun => Ok(None),
        None => Err(LaunchError::NoMainProcess { machines }),
    }
}

/// Returns the variables that pass the configuration file on to the ranks.
fn config_variables(config: &Config, path: Option<&Path>) -> Vec<(&'static str, OsString)> {
    let mut variables = Vec::new();
    if let Some(path) = path {
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.into());
        variables.push((CONFIG_VARIABLE, absolute.into()));
    }
    if config.debug {
        variables.push((DEBUG_VARIABLE, "1".into()));
    }
    if config.use_cpu {
        variables.push(("CUDA_VISIBLE_DEVICES", OsString::new()));
    } else if let Some(ids) = &config.gpu_ids {
        variables.push(("CUDA_VISIBLE_DEVICES", ids.into()));
    }
    variables
}

/// Refuses to run as one of several ranks, because each of those launchers would start all ranks.
///
/// Two cases are no ranks: one launcher a machine, started by `mpirun` or `srun`, and a launcher in
/// a Slurm batch script, outside of any `srun` step.
fn refuse_nested_launch(
    machines: usize,
    variable: &impl Fn(&str) -> Option<OsString>,
) -> Result<(), LaunchError> {
    let Some(env) = RankEnv::from_variables(variable)? else { return Ok(()) };
    let batch = env.launcher == Launcher::Slurm && variable("SLURM_STEP_NUM_TASKS").is_none();
    let one_a_machine = env.launcher != Launcher::Torchrun && env.world.size() == machines;
    if env.world.size() == 1 || batch || one_a_machine {
        return Ok(());
    }
    Err(LaunchError::StartedTwice {
        rank: env.rank.index(),
        world: env.world.size(),
        launcher: env.launcher,
    })
}

/// Returns a name that no other run on this machine has: the time in nanoseconds and the process
/// ID.
fn run_id() -> String {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    format!("{:x}-{:x}", nanos, std::process::id())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn plan(flags: &Flags, text: &str, env: &[(&str, &str)]) -> Result<Plan, LaunchError> {
        let (config, _) = Config::parse(text, "config.yaml")?;
        Plan::new(flags, &config, Some(Path::new("config.yaml")), |name| {
            env.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())
        })
    }

    #[test]
    fn flags_override_the_file() {
        let file = "num_processes: 4\nnum_machines: 2\nmain_process_ip: 127.0.0.1\n";
        let none = Flags::default();
        let of_file = plan(&none, file, &[]).unwrap();
        assert_eq!((of_file.world, of_file.local, of_file.first), (4, 2, 0));
        let flags = Flags {
            num_processes: Some(6),
            machine_rank: Some(1),
            main_process_ip: Some("localhost".into()),
            main_process_port: Some(4321),
            ..none
        };
        let overridden = plan(&flags, file, &[]).unwrap();
        assert_eq!((overridden.world, overridden.local, overridden.first), (6, 3, 3));
        assert_eq!(overridden.variable("MASTER_ADDR"), Some("localhost"));
        assert_eq!(overridden.variable("MASTER_PORT"), Some("4321"));
        assert_eq!(overridden.variable("WORLD_SIZE"), Some("6"));
        assert!(overridden.variable("FSDP_CONFIG").unwrap().ends_with("/config.yaml"));
    }

    #[test]
    fn one_machine_needs_a_number_only() {
        let flags = Flags { num_processes: Some(2), ..Flags::default() };
        let plan = plan(&flags, "use_cpu: true\ndebug: true\n", &[]).unwrap();
        assert_eq!(plan.variable("FSDP_DEBUG"), Some("1"));
        assert_eq!(plan.variable("MASTER_ADDR"), Some("127.0.0.1"));
        assert_ne!(plan.variable("MASTER_PORT"), Some("0"));
        assert_eq!(plan.variable("CUDA_VISIBLE_DEVICES"), Some(""));
    }

    #[test]
    fn every_wrong_size_is_an_error_of_its_own() {
        let flags = |n, machines, rank| Flags {
            num_processes: n,
            num_machines: machines,
            machine_rank: rank,
            ..Flags::default()
        };
        let error = |flags: Flags| plan(&flags, "", &[]).unwrap_err();
        assert!(matches!(error(flags(None, None, None)), LaunchError::NoProcesses));
        assert!(matches!(error(flags(Some(0), None, None)), LaunchError::Zero { .. }));
        assert!(matches!(error(flags(Some(1), Some(0), None)), LaunchError::Zero { .. }));
        assert!(matches!(error(flags(Some(3), Some(2), None)), LaunchError::Uneven { .. }));
        assert!(matches!(
            error(flags(Some(4), Some(2), Some(2))),
            LaunchError::MachineRank { rank: 2, machines: 2 }
        ));
        assert!(matches!(
            error(flags(Some(4), Some(2), None)),
            LaunchError::NoMainProcess { machines: 2 }
        ));
    }

    #[test]
    fn an_unusable_meeting_point_is_named() {
        let flags = Flags {
            num_processes: Some(1),
            main_process_ip: Some("no-such-host.invalid".into()),
            ..Flags::default()
        };
        let text = plan(&flags, "", &[]).unwrap_err().to_string();
        assert!(text.contains("no-such-host.invalid"), "{text}");

        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let flags =
            Flags { num_processes: Some(2), main_process_port: Some(port), ..Flags::default() };
        let error = plan(&flags, "", &[]).unwrap_err();
        assert!(matches!(error, LaunchError::PortTaken { port: taken } if taken == port));
        // Only machine 0 checks the port.
        let second = Flags {
            num_machines: Some(2),
            machine_rank: Some(1),
            main_process_ip: Some("127.0.0.1".into()),
            ..flags
        };
        assert!(plan(&second, "", &[]).is_ok());
    }

    #[test]
    fn mpirun_needs_no_meeting_point_and_starts_once() {
        let mut flags = Flags { num_processes: Some(4), mpi: true, ..Flags::default() };
        let file = "num_machines: 2\nmpirun_config:\n  mpirun_hostfile: /tmp/hosts\n";
        let of_file = plan(&flags, file, &[]).unwrap();
        let hostfile = Some(PathBuf::from("/tmp/hosts"));
        assert_eq!((of_file.mpirun.as_ref(), of_file.processes()), (Some(&Mpirun { hostfile }), 1));
        assert_eq!(of_file.variable("WORLD_SIZE"), None);
        assert_eq!(of_file.variable("MASTER_ADDR"), None);
        flags.machine_rank = Some(1);
        assert!(matches!(plan(&flags, file, &[]), Err(LaunchError::MpirunOnce { rank: 1 })));
    }

    #[test]
    fn ranks_are_started_once() {
        let flags = Flags { num_processes: Some(4), ..Flags::default() };
        let torchrun = [("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4")];
        let error = plan(&flags, "", &torchrun).unwrap_err();
        assert!(matches!(error, LaunchError::StartedTwice { rank: 1, world: 4, .. }), "{error}");

        let mpi = [
            ("OMPI_COMM_WORLD_RANK", "0"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        ];
        assert!(matches!(plan(&flags, "", &mpi), Err(LaunchError::StartedTwice { .. })));
        let two = "num_machines: 2\nmain_process_ip: 127.0.0.1\n";
        assert!(plan(&flags, two, &mpi).is_ok(), "one launcher a machine");

        let batch = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_LOCALID", "0")];
        assert!(plan(&flags, "", &batch).is_ok(), "a batch script is no rank");
        let mut step = batch.to_vec();
        step.push(("SLURM_STEP_NUM_TASKS", "4"));
        assert!(matches!(plan(&flags, "", &step), Err(LaunchError::StartedTwice { .. })));

        let half = [("RANK", "1")];
        assert!(matches!(plan(&flags, "", &half), Err(LaunchError::Env(_))));
    }
}
