//! What the launcher starts: each rank of this machine, or one `mpirun` for all ranks of all.

use std::io;
use std::process::Command;
use std::sync::mpsc::Sender;
use std::time::Duration;

use super::guard::Guard;
use super::mpi::{self, Job};
use super::output::{Stream, Tail, relay};
use super::plan::{LaunchError, Plan, RUN_ID};
use super::process::Process;
use super::supervise::Event;

/// One of the processes the launcher answers for.
#[derive(Debug)]
pub struct Member {
    /// `rank 2`, or `mpirun`.
    pub name: String,
    pub process: Process,
    pub started: Started,
}

/// What it is, with what it has printed.
#[derive(Debug)]
pub enum Started {
    Rank { rank: usize, tail: Tail },
    Mpirun(Job),
}

impl Member {
    /// Starts the process of this number on this machine.
    pub fn start(
        plan: &Plan,
        index: usize,
        program: &[String],
        grace: Duration,
        guard: &Guard,
        events: &Sender<Event>,
    ) -> Result<Self, LaunchError> {
        let width = (plan.world - 1).to_string().len();
        if let Some(mpirun) = &plan.mpirun {
            let job = Job::new(width, plan.variable(RUN_ID).unwrap_or_default());
            let command = mpi::command(plan, mpirun, program, grace)?;
            let (output, error) = (job.relay(Stream::Output), job.relay(Stream::Error));
            let process = Process::start(command, index, output, error, guard, events)?;
            return Ok(Self { name: "mpirun".into(), process, started: Started::Mpirun(job) });
        }
        let rank = plan.first + index;
        let tail = Tail::default();
        let prefix = format!("[rank {rank:width$}] ");
        let process = Process::start(
            rank_command(plan, index, program)?,
            index,
            relay(Stream::Output, io::stdout(), prefix.clone(), tail.clone()),
            relay(Stream::Error, io::stderr(), prefix, tail.clone()),
            guard,
            events,
        )?;
        let name = format!("rank {rank}");
        Ok(Self { name, process, started: Started::Rank { rank, tail } })
    }
}

fn rank_command(plan: &Plan, local: usize, program: &[String]) -> Result<Command, LaunchError> {
    let (name, args) =
        program.split_first().ok_or_else(|| LaunchError::NotFound { program: String::new() })?;
    let mut command = Command::new(name);
    command
        .args(args)
        .envs(plan.variables.iter().map(|(key, value)| (key, value)))
        .env("RANK", (plan.first + local).to_string())
        .env("LOCAL_RANK", local.to_string())
        // One launcher a machine may be started by `mpirun`; its ranks are not.
        .env_remove("OMPI_COMM_WORLD_RANK")
        .env_remove("OMPI_COMM_WORLD_SIZE")
        .env_remove("OMPI_COMM_WORLD_LOCAL_RANK");
    Ok(command)
}
