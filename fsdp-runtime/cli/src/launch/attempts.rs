//! The attempts of a launch: the ranks are started, and started again after a failure, until they
//! end well, the launcher receives a signal, or no restart is left.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use fsdp_runtime::launch::cuda;

use super::error::LaunchError;
use super::exit::{Exit, signal_name};
use super::hosts::Hosts;
use super::plan::{LaunchPlan, RUN_ID};
use super::remains;
use super::restarts::{Cause, History, Next};
use super::session::Session;
use super::settings::Settings;
use super::supervisor::{self, Failure, Outcome};
use crate::console;

/// Runs the ranks of `plan`, the first attempt. Returns the launcher's exit code, which is that of
/// the last attempt.
///
/// Must be called from the main thread: the kernel ends the ranks when the thread that started them
/// ends.
pub(super) fn run(
    settings: &Settings,
    plan: LaunchPlan,
    program: &[String],
) -> Result<u8, LaunchError> {
    let mut session = Session::start()?;
    let mut history = History::new(settings.restarts);
    let mut elastic = Elastic::new(settings, &plan);
    let mut plan = Ok(plan);
    loop {
        let begun = Instant::now();
        let world = elastic.world;
        let run_id = plan.as_ref().ok().and_then(|plan| plan.variable(RUN_ID)).map(str::to_string);
        let ended =
            plan.and_then(|plan| supervisor::run(&mut session, &plan, program, settings.grace));
        let (cause, result) = match ended {
            Ok(Outcome::Success) => {
                report(&history, true);
                return Ok(0);
            }
            Ok(Outcome::Interrupted(code)) => return Ok(code),
            Ok(Outcome::Failed(failure)) => match ends_the_run(&failure) {
                true => {
                    history.failed(&Cause { is_refusal: true, ..failure.cause }, world);
                    report(&history, false);
                    return Ok(failure.code);
                }
                false => (failure.cause, Ok(failure.code)),
            },
            Err(error) => {
                let is_refusal = history.restarts() == 0 || !error.may_pass();
                let lasted = begun.elapsed();
                let what = error.to_string();
                (Cause { what, local_rank: None, lasted, is_refusal }, Err(error))
            }
        };
        let Next::Restart { wait, without } = history.failed(&cause, world) else {
            report(&history, false);
            return result;
        };
        if let Err(error) = &result {
            console::err(error);
        }
        announce(&history, settings.restarts.max, wait);
        if let Some(signal) = session.wait(wait) {
            console::err(format_args!("ended by {} before the restart", signal_name(signal)));
            return Ok(Exit::Signal(signal).exit_code());
        }
        run_id.iter().for_each(|run| remains::wait_for_end(run));
        plan = elastic.plan(history.restarts(), without);
    }
}

/// Returns whether no attempt may follow a failure: the launcher is to end, or a rank that was
/// killed still runs, and would write to the same files.
fn ends_the_run(failure: &Failure) -> bool {
    for name in &failure.left {
        console::err(format_args!("{name} has not ended although it was killed: no restart"));
    }
    failure.interrupted || !failure.left.is_empty()
}

fn announce(history: &History, max: usize, wait: Duration) {
    let count = history.restarts();
    let seconds = wait.as_secs_f64();
    console::err(format_args!("restart {count} of at most {max} in {seconds:.1} s"));
}

fn report(history: &History, succeeded: bool) {
    history.report(succeeded).iter().for_each(console::err);
}

/// The ranks of the next attempt, of which there may be fewer than in the first.
struct Elastic {
    settings: Settings,
    /// Number of ranks of the first attempt.
    max: usize,
    /// Number of ranks of the last attempt.
    world: usize,
    /// Number of ranks that do not come back.
    lost: usize,
    /// Hosts of `mpirun`, if a file lists them and restarts may have fewer ranks.
    hosts: Option<Hosts>,
}

impl Elastic {
    fn new(settings: &Settings, plan: &LaunchPlan) -> Self {
        let hostfile = plan.mpirun.as_ref().and_then(|mpirun| mpirun.hostfile.clone());
        let hostfile = hostfile.filter(|_| settings.restarts.min_processes.is_some());
        let hosts = hostfile.map(|path: PathBuf| Hosts::new(path, plan.variable(RUN_ID)));
        let (settings, max) = (settings.clone(), plan.world);
        Self { settings, max, world: max, lost: 0, hosts }
    }

    /// Plans an attempt. `without` is the rank of the last attempt that does not come back, by its
    /// number on this machine.
    fn plan(&mut self, attempt: usize, without: Option<usize>) -> Result<LaunchPlan, LaunchError> {
        if let Some(rank) = without {
            console::err(format_args!("rank {rank} has failed at once again: going on without it"));
            self.lost += 1;
            self.leave_out_gpu(rank);
        }
        let mut world = self.max - self.lost;
        if let Some(hosts) = &self.hosts {
            let reachable = hosts.reachable()?;
            let min = self.settings.restarts.min_processes.unwrap_or(self.max);
            world = world.min(reachable.share(self.max));
            if world < min {
                return Err(reachable.too_few(world, min));
            }
            let hostfile = reachable.write()?;
            if let Some(mpirun) = &mut self.settings.config.mpirun {
                mpirun.hostfile = Some(hostfile);
            }
        }
        if world != self.world {
            console::err(format_args!("going on with {world} ranks"));
        }
        self.world = world;
        self.settings.config.num_processes = Some(world);
        if self.max != world {
            // The ranks read this value in place of the first one.
            self.settings.overrides.set("num_processes", world.to_string())?;
        }
        LaunchPlan::new(&self.settings, attempt, |name| std::env::var_os(name))
    }

    /// Removes the GPU of a rank from those that ranks see.
    fn leave_out_gpu(&mut self, rank: usize) {
        let config = &mut self.settings.config;
        if config.use_cpu || self.settings.mpi || config.mpirun.is_some() {
            return;
        }
        let visible = || std::env::var("CUDA_VISIBLE_DEVICES").ok().filter(|ids| !ids.is_empty());
        let counted = || {
            let gpus = cuda::driver().map_or(0, |driver| driver.gpus.len());
            (0..gpus).map(|gpu| gpu.to_string()).collect::<Vec<_>>().join(",")
        };
        let ids = config.gpu_ids.clone().or_else(visible).unwrap_or_else(counted);
        let left = without_id(&ids, rank);
        if !left.is_empty() {
            config.gpu_ids = Some(left);
        }
    }
}

/// Returns a list such as `0,1,3` without the item at `index`.
fn without_id(ids: &str, index: usize) -> String {
    let ids = ids.split(',').enumerate().filter(|(at, _)| *at != index);
    ids.map(|(_, id)| id).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gpu_of_a_lost_rank_is_left_out() {
        assert_eq!(without_id("0,1,3", 1), "0,3");
        assert_eq!(without_id("GPU-a,GPU-b", 0), "GPU-b");
        assert_eq!(without_id("0", 0), "");
        assert_eq!(without_id("0,1", 5), "0,1");
    }
}
