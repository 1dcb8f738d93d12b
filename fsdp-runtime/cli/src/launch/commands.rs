//! The commands of a plan: a program as one rank, or `mpirun` for all ranks.

use std::process::Command;
use std::time::Duration;

use super::error::LaunchError;
use super::plan::{GRACE, LOGS, LaunchPlan, Mpirun};

/// Returns the command for the rank `local_rank` of this machine.
pub(super) fn rank(
    plan: &LaunchPlan,
    local_rank: usize,
    program: &[String],
) -> Result<Command, LaunchError> {
    let (name, args) =
        program.split_first().ok_or_else(|| LaunchError::NotFound { program: String::new() })?;
    let mut command = Command::new(name);
    command
        .args(args)
        .envs(plan.variables.iter().map(|(key, value)| (key, value)))
        .env("RANK", (plan.first + local_rank).to_string())
        .env("LOCAL_RANK", local_rank.to_string())
        // The launcher may be one of several, one a machine, that `mpirun` started. The variables
        // that `mpirun` set for the launcher do not hold for the ranks.
        .env_remove("OMPI_COMM_WORLD_RANK")
        .env_remove("OMPI_COMM_WORLD_SIZE")
        .env_remove("OMPI_COMM_WORLD_LOCAL_RANK");
    Ok(command)
}

/// Settings of Open MPI that find a machine that is cut off within two minutes, in place of eight: idle
/// seconds before the first probe, seconds between probes, and their number. Variables of the environment
/// take precedence.
const KEEP_ALIVE: [(&str, &str); 3] = [
    ("OMPI_MCA_oob_tcp_keepalive_time", "60"),
    ("OMPI_MCA_oob_tcp_keepalive_intvl", "15"),
    ("OMPI_MCA_oob_tcp_keepalive_probes", "4"),
];

/// Returns the command `mpirun .. fsdp rank PROGRAM ARGS`. `grace` is the time between SIGTERM and
/// SIGKILL when a rank has failed.
pub(super) fn mpirun(
    plan: &LaunchPlan,
    mpirun: &Mpirun,
    program: &[String],
    grace: Duration,
) -> Result<Command, LaunchError> {
    let action = "find its own executable";
    let this = std::env::current_exe().map_err(|source| LaunchError::System { action, source })?;
    let mut command = Command::new("mpirun");
    let grace = grace.as_secs().max(1).to_string();
    command
        .args(["-n", &plan.world.to_string(), "--bind-to", "none"])
        // Seconds between SIGTERM and SIGKILL.
        .args(["--mca", "odls_base_sigkill_timeout", &grace])
        .env(GRACE, &grace)
        .args(["-x", GRACE]);
    command.envs(KEEP_ALIVE.into_iter().filter(|(name, _)| std::env::var_os(name).is_none()));
    match &plan.logs {
        Some(logs) => {
            // Each rank writes its file on its own machine, from which the launcher may be cut off.
            let folder = std::path::absolute(logs).unwrap_or_else(|_| logs.clone());
            command.env(LOGS, folder).args(["-x", LOGS]);
        }
        None => {
            command.env_remove(LOGS);
        }
    }
    if let Some(hostfile) = &mpirun.hostfile {
        command.arg("--hostfile").arg(hostfile);
    } else if std::thread::available_parallelism().is_ok_and(|cores| plan.world > cores.get()) {
        command.arg("--oversubscribe");
    }
    for (name, value) in &plan.variables {
        command.env(name, value).args(["-x", name]);
    }
    command.arg(this).arg("rank").args(program);
    Ok(command)
}
