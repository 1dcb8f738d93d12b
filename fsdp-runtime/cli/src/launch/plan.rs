//! The plan of a launch: how many ranks run on this machine, and their environment variables.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use fsdp_runtime::config::{CONFIG_VARIABLE, Config, DEBUG_VARIABLE, OVERRIDES_VARIABLE};
use fsdp_runtime::launch::env::{Launcher, RankEnv};

use super::error::LaunchError;
use super::rendezvous;
use super::settings::Settings;

/// Environment variable with the name of a run, which no other run on this machine has.
pub(super) const RUN_ID: &str = "FSDP_RUN_ID";

/// Environment variable with the secret of a run, which its ranks prove to each other.
pub(super) const SECRET: &str = "FSDP_RUN_SECRET";

/// Environment variable with the number of times that the ranks were started again.
pub(super) const RESTART_COUNT: &str = "FSDP_RESTART_COUNT";

/// Environment variable with the folder of the log files of `mpirun`'s ranks.
pub(super) const LOGS: &str = "FSDP_LOG_DIR";

/// Environment variable with the seconds between SIGTERM and SIGKILL of `mpirun`'s ranks.
pub(super) const GRACE: &str = "FSDP_GRACE";

/// Environment variable with the number of threads of a process, as OpenMP has it.
const THREADS: &str = "OMP_NUM_THREADS";

/// The ranks of this machine and their environment.
#[derive(Clone, Debug)]
pub(super) struct LaunchPlan {
    /// Number of the attempt: how often the ranks were started before.
    pub(super) attempt: usize,
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
    /// Folder of the ranks' log files.
    pub(super) logs: Option<PathBuf>,
}

/// Arguments of a call of `mpirun`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Mpirun {
    /// File that lists the hosts; `None` for this host, or for the hosts of the batch system.
    pub(super) hostfile: Option<PathBuf>,
}

impl LaunchPlan {
    /// Plans an attempt of a launch, counted from 0. `variable` reads the environment of this process.
    pub(super) fn new(
        settings: &Settings,
        attempt: usize,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, LaunchError> {
        let config = &settings.config;
        let world = config.num_processes.ok_or(LaunchError::NoProcesses)?;
        // The configuration has been checked: the machines divide the ranks, and are at least one.
        let (machines, machine) = (config.num_machines, config.machine_rank);
        let local = world / machines;
        refuse_nested_launch(machines, &variable)?;
        let mpirun = mpirun(settings, world);
        if mpirun.is_some() && machine > 0 {
            return Err(LaunchError::MpirunOnce { rank: machine });
        }
        if mpirun.is_none() && machines > 1 && settings.restarts.min_processes.is_some() {
            return Err(LaunchError::RangeOfMachines { machines });
        }

        let mut variables = vec![(RUN_ID, run_id().into())];
        // The launchers of several machines do not talk to each other: their users give a secret.
        if machines == 1 && variable(SECRET).is_none_or(|secret| secret.is_empty()) {
            variables.push((SECRET, secret()?.into()));
        } else if let Some(secret) = variable(SECRET) {
            variables.push((SECRET, secret));
        }
        if let Some(host) = main_process_host(config, mpirun.is_some())? {
            let port = rendezvous::port(config.main_process_port, machines, machine)?;
            rendezvous::resolve(host, port)?;
            variables.push(("MASTER_ADDR", host.into()));
            variables.push(("MASTER_PORT", port.to_string().into()));
        }
        // `mpirun` sets variables of its own for the sizes. `WORLD_SIZE` without `RANK`, which
        // differs by rank, would be an incomplete set, which `RankEnv` refuses.
        if mpirun.is_none() {
            variables.push(("WORLD_SIZE", world.to_string().into()));
            variables.push(("LOCAL_WORLD_SIZE", local.to_string().into()));
        }
        let threads = settings.threads.map(|threads| threads.to_string().into());
        // A value of this process's environment is passed on, so that `mpirun` does so too.
        let threads = threads.or_else(|| variable(THREADS));
        variables.extend(threads.map(|threads| (THREADS, threads)));
        variables.extend(config_variables(settings));
        variables.extend(restart_variables(attempt, settings.restarts.max));
        let logs = settings.logs.clone();
        Ok(Self { attempt, world, local, first: machine * local, variables, mpirun, logs })
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

/// Returns the arguments of `mpirun`, if it starts the ranks: with the flag `--mpi`, with a
/// `mpirun_config`, or for several ranks on CPUs, which communicate over MPI only.
fn mpirun(settings: &Settings, world: usize) -> Option<Mpirun> {
    let Settings { config, mpi, .. } = settings;
    let asked = config.mpirun.as_ref().map(|file| Mpirun { hostfile: file.hostfile.clone() });
    let needed = *mpi || (config.use_cpu && world > 1);
    asked.or_else(|| needed.then(Mpirun::default))
}

/// Returns the host of rank 0. `None` for several machines under `mpirun` without a host: MPI
/// connects the ranks by itself.
fn main_process_host(config: &Config, mpirun: bool) -> Result<Option<&str>, LaunchError> {
    match (config.main_process_ip.as_deref(), config.num_machines) {
        (Some(host), _) => Ok(Some(host)),
        (None, 1) => Ok(Some("127.0.0.1")),
        (None, _) if mpirun => Ok(None),
        (None, machines) => Err(LaunchError::NoMainProcess { machines }),
    }
}

/// Returns the variables that pass the configuration on to the ranks.
fn config_variables(settings: &Settings) -> Vec<(&'static str, OsString)> {
    let Settings { config, path, overrides, .. } = settings;
    let mut variables = Vec::new();
    if let Some(path) = path {
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.clone());
        variables.push((CONFIG_VARIABLE, absolute.into()));
    }
    // Set even if it is empty: the environment may have the one of another launcher.
    let flags = if overrides.is_empty() { String::new() } else { overrides.to_variable() };
    variables.push((OVERRIDES_VARIABLE, flags.into()));
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

/// Returns the variables with the number of restarts, under this crate's name and torchrun's.
fn restart_variables(attempt: usize, max: usize) -> [(&'static str, OsString); 3] {
    let [count, max] = [attempt, max].map(|number| number.to_string().into());
    [
        (RESTART_COUNT, OsString::clone(&count)),
        ("TORCHELASTIC_RESTART_COUNT", count),
        ("TORCHELASTIC_MAX_RESTARTS", max),
    ]
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

/// Returns a random secret of 256 bits, in hexadecimal digits.
fn secret() -> Result<String, LaunchError> {
    let mut secret = [0; 32];
    getrandom::fill(&mut secret).map_err(|error| LaunchError::System {
        action: "make the secret of the run",
        source: std::io::Error::other(error.to_string()),
    })?;
    Ok(secret.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use fsdp_runtime::config::Overrides;

    use super::*;

    /// Plans a launch with a file and values of the command line.
    fn plan(
        flags: &[(&str, &str)],
        text: &str,
        env: &[(&str, &str)],
    ) -> Result<LaunchPlan, LaunchError> {
        LaunchPlan::new(&settings(flags, text)?, 0, |name| {
            env.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())
        })
    }

    fn settings(flags: &[(&str, &str)], text: &str) -> Result<Settings, LaunchError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.yaml");
        std::fs::write(&path, text).unwrap();
        let mut overrides = Overrides::default();
        flags.iter().try_for_each(|(key, value)| overrides.set(key, *value))?;
        let (config, _) = Config::read_with(Some(&path), &overrides)?;
        Ok(Settings { config, path: Some(path), overrides, ..Settings::default() })
    }

    #[test]
    fn flags_override_the_file() {
        let file = "num_processes: 4\nnum_machines: 2\nmain_process_ip: 127.0.0.1\n";
        let of_file = plan(&[], file, &[]).unwrap();
        assert_eq!((of_file.world, of_file.local, of_file.first), (4, 2, 0));
        assert_eq!(of_file.variable("FSDP_CONFIG_FLAGS"), Some(""));
        let flags = [
            ("num_processes", "6"),
            ("machine_rank", "1"),
            ("main_process_ip", "localhost"),
            ("main_process_port", "4321"),
        ];
        let overridden = plan(&flags, file, &[]).unwrap();
        assert_eq!((overridden.world, overridden.local, overridden.first), (6, 3, 3));
        assert_eq!(overridden.variable("MASTER_ADDR"), Some("localhost"));
        assert_eq!(overridden.variable("MASTER_PORT"), Some("4321"));
        assert_eq!(overridden.variable("WORLD_SIZE"), Some("6"));
        assert!(overridden.variable("FSDP_CONFIG").unwrap().ends_with("/config.yaml"));
        let flags = overridden.variable("FSDP_CONFIG_FLAGS").unwrap();
        assert!(flags.contains(r#""machine_rank":"1""#), "{flags}");
    }

    #[test]
    fn one_machine_needs_a_number_only() {
        let one = plan(&[("num_processes", "1")], "use_cpu: true\ndebug: true\n", &[]).unwrap();
        assert_eq!(one.variable("FSDP_DEBUG"), Some("1"));
        assert_eq!(one.variable("MASTER_ADDR"), Some("127.0.0.1"));
        assert_ne!(one.variable("MASTER_PORT"), Some("0"));
        assert_eq!(one.variable("CUDA_VISIBLE_DEVICES"), Some(""));
        assert_eq!(one.mpirun, None);
    }

    #[test]
    fn each_launch_has_a_secret_or_that_of_its_user() {
        let secret = |flags: &[(&str, &str)], env: &[(&str, &str)]| {
            plan(flags, "num_processes: 2\n", env).unwrap().variable(SECRET).map(str::to_string)
        };
        let (one, two) = (secret(&[], &[]).unwrap(), secret(&[], &[(SECRET, "")]).unwrap());
        assert!(one.len() == 64 && one != two, "{one} {two}");
        assert_eq!(secret(&[], &[(SECRET, "mine")]), Some("mine".into()));
        // Launchers on several machines cannot agree on one by themselves.
        let machines = [("num_machines", "2"), ("main_process_ip", "127.0.0.1")];
        assert_eq!(secret(&machines, &[]), None);
        assert_eq!(secret(&machines, &[(SECRET, "ours")]), Some("ours".into()));
    }

    #[test]
    fn the_gpus_of_the_flag_are_the_visible_ones() {
        let visible = |flags: &[(&str, &str)]| {
            let plan = plan(flags, "num_processes: 2\n", &[]).unwrap();
            plan.variable("CUDA_VISIBLE_DEVICES").map(str::to_string)
        };
        assert_eq!(visible(&[("gpu_ids", "0,1")]), Some("0,1".into()));
        assert_eq!(visible(&[("gpu_ids", "all")]), None);
    }

    #[test]
    fn several_processes_on_cpus_are_started_by_mpirun() {
        let two = plan(&[("num_processes", "2"), ("use_cpu", "true")], "", &[]).unwrap();
        assert_eq!(two.mpirun, Some(Mpirun::default()));
        let gpus = plan(&[("num_processes", "2"), ("use_cpu", "false")], "use_cpu: true\n", &[]);
        assert_eq!(gpus.unwrap().mpirun, None);
    }

    #[test]
    fn threads_are_those_of_the_flag_or_of_the_environment() {
        let mut settings = settings(&[("num_processes", "2")], "").unwrap();
        let threads = |settings: &Settings, env: Option<&str>| {
            let plan = LaunchPlan::new(settings, 0, |name| {
                (name == THREADS).then(|| env.map(Into::into))?
            });
            plan.unwrap().variable(THREADS).map(str::to_string)
        };
        assert_eq!(threads(&settings, None), None);
        assert_eq!(threads(&settings, Some("3")), Some("3".into()));
        settings.threads = std::num::NonZeroUsize::new(5);
        assert_eq!(threads(&settings, Some("3")), Some("5".into()));
    }

    #[test]
    fn a_plan_needs_a_number_of_ranks_and_a_main_process() {
        let error = |flags: &[(&str, &str)]| plan(flags, "", &[]).unwrap_err();
        assert!(matches!(error(&[]), LaunchError::NoProcesses));
        for flags in [
            &[("num_processes", "0")][..],
            &[("num_processes", "1"), ("num_machines", "0")],
            &[("num_processes", "3"), ("num_machines", "2")],
            &[("num_processes", "4"), ("num_machines", "2"), ("machine_rank", "2")],
        ] {
            let error = error(flags);
            assert!(matches!(error, LaunchError::Config(_)), "{flags:?}: {error}");
            assert!(error.to_string().starts_with("command line: "), "{error}");
        }
        assert!(matches!(
            error(&[("num_processes", "4"), ("num_machines", "2")]),
            LaunchError::NoMainProcess { machines: 2 }
        ));
    }

    #[test]
    fn an_unusable_meeting_point_is_named() {
        let flags = [("num_processes", "1"), ("main_process_ip", "no-such-host.invalid")];
        let text = plan(&flags, "", &[]).unwrap_err().to_string();
        assert!(text.contains("no-such-host.invalid"), "{text}");

        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let number = port.to_string();
        let flags = [("num_processes", "2"), ("main_process_port", number.as_str())];
        let error = plan(&flags, "", &[]).unwrap_err();
        assert!(matches!(error, LaunchError::PortTaken { port: taken } if taken == port));
        // Only machine 0 checks the port.
        let second =
            [("num_machines", "2"), ("machine_rank", "1"), ("main_process_ip", "127.0.0.1")];
        assert!(plan(&[&flags[..], &second].concat(), "", &[]).is_ok());
    }

    #[test]
    fn mpirun_needs_no_meeting_point_and_starts_once() {
        let flags = [("num_processes", "4")];
        let file = "num_machines: 2\nmpirun_config:\n  mpirun_hostfile: /tmp/hosts\n";
        let of_file = plan(&flags, file, &[]).unwrap();
        let hostfile = Some(PathBuf::from("/tmp/hosts"));
        assert_eq!((of_file.mpirun.as_ref(), of_file.processes()), (Some(&Mpirun { hostfile }), 1));
        assert_eq!(of_file.variable("WORLD_SIZE"), None);
        assert_eq!(of_file.variable("MASTER_ADDR"), None);
        let second = [flags[0], ("machine_rank", "1")];
        assert!(matches!(plan(&second, file, &[]), Err(LaunchError::MpirunOnce { rank: 1 })));
        let mut settings = settings(&flags, "").unwrap();
        settings.mpi = true;
        let of_flag = LaunchPlan::new(&settings, 0, |_| None).unwrap();
        assert_eq!(of_flag.mpirun, Some(Mpirun::default()));
    }

    #[test]
    fn ranks_are_started_once() {
        let flags = [("num_processes", "4")];
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
