//! Tests of ranks with a GPU each that need no GPU, and the program of `tests/netns.py`.

use super::*;
use crate::launch::env::Launcher;

#[test]
fn the_gpu_of_a_process_follows_from_its_local_rank() {
    let world = WorldSize::new(8).unwrap();
    let env = |local_rank| RankEnv {
        rank: world.ranks().nth(4 + local_rank).unwrap(),
        world,
        local_rank,
        local_world: Some(4),
        launcher: Launcher::Torchrun,
        main_process: None,
    };
    assert_eq!((own_gpu(&env(0), 0, 4), own_gpu(&env(3), 0, 4)), (0, 3));
    assert_eq!(own_gpu(&env(1), 2, 4), 3, "counted from the first GPU");
    assert_eq!(own_gpu(&env(3), 0, 1), 0, "the only visible GPU");
}

/// Returns a variable as a number.
fn number<T: std::str::FromStr>(name: &str, default: T) -> T {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// A linear model of three weights that all ranks fit together: each has its own examples, and the
/// gradients are exchanged as the ranks of the engine `nccl` exchange host values.
///
/// Returns the loss of each step, which depends on every gradient before it.
fn fit(host: &HostGroup, steps: usize, pause: Duration) -> Result<Vec<f64>, CollectiveError> {
    let (rank, world) = (host.rank().index(), host.members().len());
    let mut weights = [0.0f64; 3];
    let mut losses = Vec::with_capacity(steps);
    for step in 0..steps {
        // Numbers between -1 and 1 that differ with step and rank.
        let value = |at: usize| ((step * world + rank) * 7 + at * 3) as f64;
        let x: [f64; 3] = std::array::from_fn(|at| value(at).sin());
        let target = x[0] - 2.0 * x[1] + 0.5 * x[2];
        let error = x.iter().zip(&weights).map(|(x, w)| x * w).sum::<f64>() - target;
        let own = [error * x[0], error * x[1], error * x[2], error * error];
        let all = host.exchange(&Op::new("all_reduce", format!("step {step}")), own)?;
        let sum = |at: usize| all.iter().map(|own| own[at]).sum::<f64>() / world as f64;
        weights.iter_mut().enumerate().for_each(|(at, weight)| *weight -= 0.1 * sum(at));
        losses.push(sum(3));
        if rank == 0 && step % 100 == 0 {
            println!("\nstep {step} of {steps}");
        }
        std::thread::sleep(pause);
    }
    Ok(losses)
}

/// A rank that the environment describes: it joins the others as a rank with a GPU does, and trains
/// without one.
///
/// | variable | meaning |
/// |---|---|
/// | `STEPS`, `PAUSE_MS` | number of steps, and milliseconds after each |
/// | `TIMEOUT_MS` | how long ranks wait for each other |
#[test]
#[ignore = "the program of a rank, which `tests/netns.py` starts"]
fn rank_on_a_machine() {
    let env = RankEnv::read().unwrap().expect("started by `fsdp launch`");
    let timeout = Duration::from_millis(number("TIMEOUT_MS", 10_000));
    match trained(&env, timeout) {
        Ok(losses) if env.rank == Rank::ZERO => {
            let bits = |loss: &f64| format!("{:x}", loss.to_bits());
            println!("\nlosses {}", losses.iter().map(bits).collect::<Vec<_>>().join(" "));
        }
        Ok(_) => {}
        Err(error) => {
            let line = format!("\nError: {error}\n");
            eprint!("{line}");
            std::process::exit(1);
        }
    }
}

/// Joins the other ranks, and trains with them. Returns the losses.
fn trained(env: &RankEnv, timeout: Duration) -> Result<Vec<f64>, LaunchError> {
    let rendezvous = rendezvous(env, timeout, false).expect("`fsdp launch` gives an address");
    let host = HostGroup::process(&rendezvous).map_err(EngineError::from);
    let host =
        host.map_err(|error| LaunchError::new(env.rank, env.world, BoxedError::from(error)))?;
    let mut machines = Machines::new();
    let mut train = || -> Result<Vec<f64>, CollectiveError> {
        let all = host.exchange(&Op::new("all_gather", "the machines"), machine_name())?;
        machines = all.iter().map(|machine| (**machine).clone()).collect();
        let losses =
            fit(&host, number("STEPS", 100), Duration::from_millis(number("PAUSE_MS", 0)))?;
        host.exchange(&Op::new("barrier", "the end of the run"), ())?;
        Ok(losses)
    };
    let outcome = train();
    let failure = host.failure();
    host.leave();
    outcome.map_err(|error| {
        launch_error(failure, env, &machines, crate::error::Error::from(error).into())
    })
}
