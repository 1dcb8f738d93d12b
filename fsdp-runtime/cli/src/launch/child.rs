//! The child processes of the launcher: each rank of this machine, or one `mpirun` for all ranks of
//! all machines.

use std::io;
use std::time::Duration;

use super::commands;
use super::error::LaunchError;
use super::exit::Exit;
use super::mpi::JobOutput;
use super::output::{Stream, Tail, forward_to};
use super::plan::{LaunchPlan, RUN_ID};
use super::process::{Process, Spawner};

/// A child process of the launcher.
#[derive(Debug)]
pub(super) struct Child {
    /// `rank 2`, or `mpirun`.
    pub(super) name: String,
    pub(super) process: Process,
    output: Output,
}

/// Output of a child process.
#[derive(Debug)]
enum Output {
    Rank { rank: usize, local_rank: usize, tail: Tail },
    Mpirun(JobOutput),
}

/// The failure of a rank, with the last lines that the rank has printed.
#[derive(Debug)]
pub(super) struct RankFailure {
    pub(super) rank: usize,
    /// Number of the rank among those of this launcher.
    pub(super) local_rank: usize,
    pub(super) exit: Exit,
    pub(super) last_lines: Vec<String>,
}

impl Child {
    /// Starts `program` as the rank `index` of this machine, or `mpirun` if the plan says so.
    /// `grace` is for `mpirun`: the time between SIGTERM and SIGKILL after a failure.
    pub(super) fn start(
        plan: &LaunchPlan,
        index: usize,
        program: &[String],
        grace: Duration,
        spawner: Spawner<'_>,
    ) -> Result<Self, LaunchError> {
        // Digits of the last rank, to align the lines of all ranks.
        let width = (plan.world - 1).to_string().len();
        let action = "write the log file of a rank";
        let tail = |rank| {
            let tail = Tail::of_rank(rank, plan.logs.as_deref());
            tail.map_err(|source| LaunchError::System { action, source })
        };
        if let Some(mpirun) = &plan.mpirun {
            let tails = (0..plan.world).map(|_| Tail::default()).collect();
            let run = plan.variable(RUN_ID).unwrap_or_default();
            let output = JobOutput::new(width, run, tails);
            let command = commands::mpirun(plan, mpirun, program, grace)?;
            let (stdout, stderr) = (output.reader(Stream::Stdout), output.reader(Stream::Stderr));
            let process = spawner.spawn(command, index, stdout, stderr)?;
            return Ok(Self { name: "mpirun".into(), process, output: Output::Mpirun(output) });
        }
        let rank = plan.first + index;
        let tail = tail(rank)?;
        let prefix = format!("[rank {rank:width$}] ");
        let process = spawner.spawn(
            commands::rank(plan, index, program)?,
            index,
            forward_to(Stream::Stdout, io::stdout(), prefix.clone(), tail.clone()),
            forward_to(Stream::Stderr, io::stderr(), prefix, tail.clone()),
        )?;
        Ok(Self {
            name: format!("rank {rank}"),
            process,
            output: Output::Rank { rank, local_rank: index, tail },
        })
    }

    /// Returns the failure of this rank, which ended with `exit`, or of the rank that failed first
    /// under `mpirun`. `None` if `mpirun` failed without a failed rank.
    pub(super) fn rank_failure(&self, exit: Exit) -> Option<RankFailure> {
        match &self.output {
            Output::Rank { rank, local_rank, tail } => {
                let (rank, local_rank) = (*rank, *local_rank);
                Some(RankFailure { rank, local_rank, exit, last_lines: tail.lines() })
            }
            Output::Mpirun(output) => {
                let (rank, exit) = output.first_failure()?;
                let last_lines = output.last_lines(rank);
                Some(RankFailure { rank, local_rank: rank, exit, last_lines })
            }
        }
    }
}
