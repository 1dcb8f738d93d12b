//! How many ranks to start on this machine, and which variables to give them.

use std::ffi::OsString;
use std::io;
use std::net::{Ipv4Addr, TcpListener, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use fsdp_runtime::config::{CONFIG_VARIABLE, Config, ConfigError, DEBUG_VARIABLE};
use fsdp_runtime::env::{EnvError, Launcher, RankEnv};

/// Where ranks of several machines meet if nothing says so: Accelerate's port.
const DEFAULT_PORT: u16 = 29500;

/// The variable that names a run.
pub const RUN_ID: &str = "FSDP_RUN_ID";

/// Why ranks cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Env(#[from] EnvError),
    #[error(
        "how many ranks? give --num-processes N, or a file with `num_processes`; \
         `fsdp config` writes one"
    )]
    NoProcesses,
    #[error("{name} is 0; at least one is needed")]
    Zero { name: &'static str },
    #[error(
        "{processes} processes cannot be shared evenly by {machines} machines; \
         --num-processes counts those of all machines"
    )]
    Uneven { processes: usize, machines: usize },
    #[error("--machine-rank is {rank}, but there are {machines} machines; they count from 0")]
    MachineRank { rank: usize, machines: usize },
    #[error(
        "{machines} machines need to know the first of them; give --main-process-ip HOST, \
         or `main_process_ip` in the file"
    )]
    NoMainProcess { machines: usize },
    #[error(
        "the main process's host `{host}` cannot be resolved: {source}; check --main-process-ip"
    )]
    Unresolved { host: String, source: io::Error },
    #[error(
        "port {port} is taken on this machine; end what listens there, or choose another with \
         --main-process-port"
    )]
    PortTaken { port: u16 },
    #[error("port {port} cannot be used: {source}; choose another with --main-process-port")]
    Port { port: u16, source: io::Error },
    #[error(
        "the ranks are started twice: this launcher is itself rank {rank} of {world}, started by \
         {launcher}; start the program with one of the two"
    )]
    StartedTwice { rank: usize, world: usize, launcher: Launcher },
    #[error(
        "--machine-rank is {rank}, but `mpirun` starts the ranks of all machines; run this on \
         machine 0 only"
    )]
    MpirunOnce { rank: usize },
    #[error("`{program}` was not found; give a path, or a program on PATH")]
    NotFound { program: String },
    #[error("`{program}` cannot be started: {source}")]
    CannotStart { program: String, source: io::Error },
    #[error("the launcher cannot work: {what}: {source}")]
    System { what: &'static str, source: io::Error },
    #[cfg(not(unix))]
    #[error("`fsdp launch` needs Unix; start each rank with RANK, LOCAL_RANK and WORLD_SIZE set")]
    NotUnix,
}

impl LaunchError {
    /// The error of a program that the system would not run.
    pub fn not_started(program: String, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::NotFound => Self::NotFound { program },
            _ => Self::CannotStart { program, source },
        }
    }

    /// The launcher's exit code; those of `sh` for a program that cannot be started.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NotFound { .. } => 127,
            Self::CannotStart { .. } => 126,
            _ => 1,
        }
    }
}

/// What the command line says; it counts before the file.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    pub num_processes: Option<usize>,
    pub num_machines: Option<usize>,
    pub machine_rank: Option<usize>,
    pub main_process_ip: Option<String>,
    pub main_process_port: Option<u16>,
    /// Start ranks by `mpirun`.
    pub mpi: bool,
}

/// The ranks of this machine, and what they are told.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Ranks on all machines.
    pub world: usize,
    /// Ranks on this one.
    pub local: usize,
    /// The first of those.
    pub first: usize,
    /// Variables that are the same for all ranks.
    pub variables: Vec<(&'static str, OsString)>,
    /// Start all of them by `mpirun`.
    pub mpirun: Option<Mpirun>,
}

/// How to call `mpirun`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mpirun {
    /// The file of hosts, if not this one alone or a batch system's.
    pub hostfile: Option<PathBuf>,
}

impl Plan {
    /// Settles how to start ranks. `path` is the file `config` was read from; `variable` reads this
    /// process's environment.
    pub fn new(
        flags: &Flags,
        config: &Config,
        path: Option<&Path>,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, LaunchError> {
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
        once(machines, &variable)?;
        let mpirun = mpirun(flags, config);
        if mpirun.is_some() && machine > 0 {
            return Err(LaunchError::MpirunOnce { rank: machine });
        }

        let local = world / machines;
        let mut variables: Vec<(&'static str, OsString)> = vec![(RUN_ID, run_id().into())];
        let host = flags.main_process_ip.as_deref().or(config.main_process_ip.as_deref());
        let host = match host {
            Some(host) => Some(host),
            None if machines == 1 => Some("127.0.0.1"),
            // Its ranks find each other by themselves.
            None if mpirun.is_some() => None,
            None => return Err(LaunchError::NoMainProcess { machines }),
        };
        if let Some(host) = host {
            let port = flags.main_process_port.filter(|port| *port != 0);
            let port = meeting_port(port.or(config.main_process_port), machines, machine)?;
            resolve(host, port)?;
            variables.push(("MASTER_ADDR", host.into()));
            variables.push(("MASTER_PORT", port.to_string().into()));
        }
        // `mpirun` has variables of its own for these, and without `RANK` they would be half a place.
        if mpirun.is_none() {
            variables.push(("WORLD_SIZE", world.to_string().into()));
            variables.push(("LOCAL_WORLD_SIZE", local.to_string().into()));
        }
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
        Ok(Self { world, local, first: machine * local, variables, mpirun })
    }

    /// The value of a variable.
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.variables.iter().find(|(key, _)| *key == name).and_then(|(_, value)| value.to_str())
    }

    /// How many processes the launcher starts itself.
    pub fn processes(&self) -> usize {
        if self.mpirun.is_some() { 1 } else { self.local }
    }
}

/// `mpirun` is asked for by a flag, or by the file's `mpirun_config`.
fn mpirun(flags: &Flags, config: &Config) -> Option<Mpirun> {
    let of_file = config.mpirun.as_ref().map(|file| Mpirun { hostfile: file.hostfile.clone() });
    of_file.or_else(|| flags.mpi.then(Mpirun::default))
}

/// A launcher that was itself started as one of several ranks would start them several times. One
/// launcher a machine is right, as is one within a Slurm batch script, which is a rank of nothing.
fn once(machines: usize, variable: &impl Fn(&str) -> Option<OsString>) -> Result<(), LaunchError> {
    let Some(place) = RankEnv::from_variables(variable)? else { return Ok(()) };
    let batch = place.launcher == Launcher::Slurm && variable("SLURM_STEP_NUM_TASKS").is_none();
    let one_a_machine = place.launcher != Launcher::Torchrun && place.world.size() == machines;
    if place.world.size() == 1 || batch || one_a_machine {
        return Ok(());
    }
    Err(LaunchError::StartedTwice {
        rank: place.rank.index(),
        world: place.world.size(),
        launcher: place.launcher,
    })
}

/// The port at which ranks meet. On the machine of rank 0 it must be free.
fn meeting_port(port: Option<u16>, machines: usize, machine: usize) -> Result<u16, LaunchError> {
    let port = match port {
        Some(port) => port,
        None if machines == 1 => 0,
        None => DEFAULT_PORT,
    };
    if machine > 0 {
        return Ok(port);
    }
    let bound =
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).and_then(|listener| listener.local_addr());
    match bound {
        Ok(address) => Ok(address.port()),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            Err(LaunchError::PortTaken { port })
        }
        Err(source) => Err(LaunchError::Port { port, source }),
    }
}

fn resolve(host: &str, port: u16) -> Result<(), LaunchError> {
    let unresolved = |source| LaunchError::Unresolved { host: host.into(), source };
    let mut addresses = (host, port).to_socket_addrs().map_err(unresolved)?;
    match addresses.next() {
        Some(_) => Ok(()),
        None => Err(unresolved(io::Error::other("it has no address"))),
    }
}

/// A name that no other run on this machine has.
fn run_id() -> String {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    format!("{:x}-{:x}", nanos, std::process::id())
}

#[cfg(test)]
mod tests {
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
        // It is free or taken on machine 0 only.
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
