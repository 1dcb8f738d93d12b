//! Ranks that are processes of Open MPI. Each test starts this program again under `mpirun`, with
//! one of the ignored tests at the end of the file as the program of each rank. Skipped where there
//! is no `mpirun`.

mod support;

#[path = "mpi/parts.rs"]
mod parts;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Distribution, Shape, Tensor, TensorData};
use fsdp_runtime::Error;
use fsdp_runtime::errors::{CollectiveError, EngineError, LaunchError, ShardError};
use fsdp_runtime::prelude::*;
use support::{Net, Outcome, Run, batch, loss};

const TIMEOUT: Duration = Duration::from_secs(3);

/// `mpirun` of this program, in which every rank runs the ignored test `program`.
fn mpirun(ranks: usize, program: &str) -> Option<Command> {
    if Command::new("mpirun").arg("--version").output().is_err() {
        eprintln!("skipped: there is no `mpirun`");
        return None;
    }
    let mut command = Command::new("mpirun");
    command
        .args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks.to_string()])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", program, "--ignored", "--nocapture"]);
    Some(command)
}

/// The end of a run under `mpirun`.
struct Ended {
    /// Standard output, then standard error.
    text: String,
    success: bool,
    took: Duration,
}

impl Ended {
    fn of(mut command: Command) -> Self {
        let started = Instant::now();
        let output = command.stdin(Stdio::null()).output().unwrap();
        let text = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        Self { text: text.concat(), success: output.status.success(), took: started.elapsed() }
    }
}

/// Returns the fingerprint of an outcome: bits of losses and norms, and of all parameters.
fn bits(outcome: &Outcome) -> String {
    let bits: Vec<u64> =
        outcome.losses.iter().chain(&outcome.norms).map(|value| value.to_bits()).collect();
    format!("{bits:x?} {:x}", fingerprint(&outcome.state))
}

/// Returns a fingerprint of all paths and values.
fn fingerprint(state: &BTreeMap<String, TensorData>) -> u64 {
    let mut hash = 0u64;
    for (path, data) in state {
        for byte in path.bytes().chain(data.as_bytes().iter().copied()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
        }
    }
    hash
}

fn runs() -> Vec<Run> {
    let run = Run { dropout: 0.1, clip: Some(0.5), threads: Some(1), ..Run::new(4) };
    let with = |options: FsdpOptions| Run { options, ..run.clone() };
    let options = || FsdpOptions::new().with_seed(7);
    let strategy = |strategy| with(options().with_strategy(strategy));
    let hybrid = |strategy| {
        with(options().with_strategy(strategy).with_shard_size(2).with_persist_below(200))
    };
    let stored = |storage| {
        let policy = StoragePolicy::new().with_frozen(storage);
        Run { frozen: true, ..with(options().with_storage(policy)) }
    };
    let half = StoragePolicy::new().with_trained(StorageType::Bf16);
    let trained = with(options().with_storage(half));
    let quantized = |options: FsdpOptions| {
        options.with_quantized_gathers(Some(64)).with_quantized_reductions(Some(128))
    };
    vec![
        run.clone(),
        stored(StorageType::Bf16),
        stored(StorageType::INT8),
        stored(StorageType::NF4),
        trained.clone(),
        Run { options: quantized(trained.options), ..run.clone() },
        with(quantized(options())),
        strategy(ShardingStrategy::ShardGradOp),
        strategy(ShardingStrategy::NoShard),
        hybrid(ShardingStrategy::HybridShard),
        hybrid(ShardingStrategy::HybridShardZero2),
        with(options().with_reshard_after_forward(ReshardAfterForward::To(2))),
        with(options().with_sync_module_states(false)),
    ]
}

#[test]
fn processes_train_with_the_bits_of_threads() {
    let Some(command) = mpirun(4, "rank_of_every_strategy") else { return };
    let ended = Ended::of(command);
    assert!(ended.success, "{}", ended.text);
    for (index, run) in runs().iter().enumerate() {
        let expected = format!("run {index}: {}", bits(&run.launch()));
        assert!(ended.text.contains(&expected), "{expected}\n{}", ended.text);
    }
}

#[test]
fn a_slow_rank_is_named_with_unit_and_operation() {
    let Some(mut command) = mpirun(3, "rank_of_a_long_run") else { return };
    command.env("SLOW", "1");
    let ended = Ended::of(command);
    assert!(!ended.success && ended.took < 4 * TIMEOUT, "{:?}\n{}", ended.took, ended.text);
    let expected = "rank 1 of 3: all_gather of (root): rank 1 did not join within 3s";
    assert!(ended.text.contains(expected), "{}", ended.text);
}

#[test]
fn a_rank_that_panics_ends_all_before_the_time_out() {
    let Some(mut command) = mpirun(3, "rank_of_a_long_run") else { return };
    command.env("PANIC", "2");
    let ended = Ended::of(command);
    assert!(!ended.success && ended.took < 2 * TIMEOUT, "{:?}\n{}", ended.took, ended.text);
    assert!(ended.text.contains("rank 2 of 3: panicked: diverged"), "{}", ended.text);
    assert!(ended.text.contains("rank 2 of 3: rank 2 failed: panicked"), "{}", ended.text);
}

/// Starts a long run. Returns it, and the processes of its ranks, once all have taken three steps.
fn under_way(flags: &[&str]) -> Option<(Child, Vec<u32>)> {
    let mut command = Command::new("mpirun");
    command.args(flags);
    command.args(mpirun(3, "rank_of_a_long_run")?.get_args());
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = child.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let (mut processes, mut steps) = ([0; 3], 0);
    while steps < 3 {
        let line = lines.next().expect("the run goes on").unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["rank", rank, "is", "process", process] => {
                processes[rank.parse::<usize>().unwrap()] = process.parse().unwrap();
            }
            ["rank", _, "took", "step", "3"] => steps += 1,
            _ => {}
        }
    }
    // A rank would block on a pipe that is full.
    std::thread::spawn(move || lines.for_each(drop));
    Some((child, processes.to_vec()))
}

fn signal(name: &str, process: u32) {
    assert!(Command::new("kill").args([name, &process.to_string()]).status().unwrap().success());
}

/// Waits for a run to fail, asserts that no process is left, and returns its standard error.
fn end_of(mut child: Child, processes: &[u32], within: Duration) -> String {
    let started = Instant::now();
    let mut text = String::new();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    let status = child.wait().unwrap();
    assert!(!status.success(), "{text}");
    assert!(started.elapsed() < within, "{:?}\n{text}", started.elapsed());
    for process in processes {
        let status = std::fs::read_to_string(format!("/proc/{process}/status"));
        let left = status.is_ok_and(|status| !status.contains("State:\tZ"));
        assert!(!left, "process {process} is left: {text}");
    }
    text
}

#[test]
fn a_stopped_rank_is_named_and_leaves_no_process() {
    let Some((child, processes)) = under_way(&[]) else { return };
    signal("-STOP", processes[1]);
    let text = end_of(child, &processes, TIMEOUT + Duration::from_secs(10));
    assert!(text.contains("rank 1 of 3: ") && text.contains("rank 1 did not join"), "{text}");
}

#[test]
fn a_killed_rank_is_named_by_mpirun_at_once() {
    let Some((child, processes)) = under_way(&[]) else { return };
    signal("-KILL", processes[1]);
    let text = end_of(child, &processes, Duration::from_secs(10));
    assert!(text.contains("process rank 1") && text.contains("signal 9"), "{text}");
}

#[test]
fn a_killed_rank_is_named_by_the_others_where_mpirun_lets_them_live() {
    let lives = ["--mca", "orte_abort_on_non_zero_status", "0"];
    let Some((child, processes)) = under_way(&lives) else { return };
    signal("-KILL", processes[2]);
    let text = end_of(child, &processes, TIMEOUT + Duration::from_secs(10));
    assert!(text.contains("rank 2 of 3: ") && text.contains("rank 2 did not join"), "{text}");
}

#[test]
fn another_number_of_processes_than_asked_for_is_refused() {
    let Some(command) = mpirun(2, "rank_of_a_long_run") else { return };
    let ended = Ended::of(command);
    assert!(!ended.success, "{}", ended.text);
    let expected = "the program asks for 3 ranks, but Open MPI's `mpirun` has started 2 processes";
    assert!(ended.text.contains(expected), "{}", ended.text);
}

#[test]
fn processes_that_mpi_has_not_joined_are_refused() {
    if mpirun(1, "").is_none() {
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "rank_of_a_long_run", "--ignored", "--nocapture"]);
    command.envs([("RANK", "1"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "1")]);
    let ended = Ended::of(command);
    assert!(!ended.success, "{}", ended.text);
    let expected = "as rank 1 of 3, but to MPI it is rank 0 of 1";
    assert!(ended.text.contains(expected), "{}", ended.text);
}

#[test]
fn ranks_with_different_seeds_are_an_error_on_all() {
    let Some(command) = mpirun(3, "rank_with_a_seed_of_its_own") else { return };
    let ended = Ended::of(command);
    assert!(ended.success, "{}", ended.text);
    let expected = "rank 0 has `option seed: Some(0)`, rank 1, 2 has `option seed: Some(1)`";
    assert_eq!(ended.text.matches(expected).count(), 3, "{}", ended.text);
}

#[test]
fn processes_share_the_initialisation_of_parameters() {
    let Some(command) = mpirun(4, "rank_that_counts_what_it_draws") else { return };
    let ended = Ended::of(command);
    assert!(ended.success, "{}", ended.text);
    // Six matrices of one size. Rank 0 initialises the biases too, which are broadcast together.
    // Rank 3 has one thread, and initialises nothing.
    for (what, counts) in [
        ("seeded", [8, 2, 2, 0]),
        ("unseeded", [12, 0, 0, 0]),
        ("whole", [8, 2, 2, 0]),
        ("a layer of rank 0 alone", [8, 2, 2, 0]),
        ("a value of rank 0", [8, 2, 1, 0]),
    ] {
        for (rank, count) in counts.iter().enumerate() {
            let expected = format!("{what}: rank {rank} drew {count}\n");
            assert!(ended.text.contains(&expected), "{expected}\n{}", ended.text);
        }
    }
    // The same values as thread ranks, of which one initialises all parameters.
    let options = LaunchOptions::new(4).with_engine(Engine::Local).with_device(Device::flex());
    let values = launch(options, |worker| {
        let of = |width| {
            let model = Counted::new(width, worker.device(), &Arc::default());
            fully_shard(model, &worker, FsdpOptions::new().with_seed(3)).map(|model| model.values())
        };
        Ok::<_, Error>((of(30)?, of(300)?))
    });
    let (narrow, wide) = values.unwrap()[0];
    for (what, values) in [("seeded", narrow), ("whole", wide), ("a layer of rank 0 alone", narrow)]
    {
        let expected = format!("{what}: the values {values:x}\n");
        assert_eq!(ended.text.matches(&expected).count(), 4, "{expected}\n{}", ended.text);
    }
}

#[test]
fn a_wrong_shape_that_one_rank_finds_is_an_error_on_all() {
    let Some(command) = mpirun(3, "rank_that_draws_another_shape") else { return };
    let ended = Ended::of(command);
    assert!(!ended.success, "{}", ended.text);
    assert!(ended.text.contains("rank 1 found it itself: true"), "{}", ended.text);
    for rank in [0, 2] {
        let expected =
            format!("rank {rank} has the error: rank 1 failed: `layers.1.weight` declares");
        assert!(ended.text.contains(&expected), "{expected}\n{}", ended.text);
    }
}

#[test]
#[ignore = "the program of a rank"]
fn rank_of_every_strategy() {
    for (index, run) in runs().iter().enumerate() {
        let outcome = run.launch();
        let place = fsdp_runtime::launch::env::RankEnv::read().unwrap().expect("started by mpirun");
        if place.rank == fsdp_runtime::Rank::ZERO {
            println!("\nrun {index}: {}", bits(&outcome));
        }
    }
}

#[test]
#[ignore = "the program of a rank"]
fn rank_of_split_matrices() {
    let options = LaunchOptions::new(4).with_timeout(4 * TIMEOUT).with_threads_per_rank(1);
    for bits in launch(options, |worker| parts::train(&worker)).unwrap() {
        println!("\n{bits}");
    }
}

#[test]
#[ignore = "the program of a rank"]
fn rank_of_a_long_run() {
    let fault = |name| std::env::var(name).ok().and_then(|rank| rank.parse::<usize>().ok());
    let (slow, panics) = (fault("SLOW"), fault("PANIC"));
    let options = LaunchOptions::new(3).with_timeout(TIMEOUT).with_threads_per_rank(1);
    let outcome: Result<Vec<()>, LaunchError> = launch(options, move |worker| {
        let rank = worker.rank().index();
        println!("\nrank {rank} is process {}", std::process::id());
        let mut net = fully_shard(Net::new(3, 0.0, worker.device()), &worker, FsdpOptions::new())?;
        let mut optimizer = burn::optim::AdamWConfig::new().init();
        for step in 0.. {
            if step == 3 {
                if slow == Some(rank) {
                    std::thread::sleep(3 * TIMEOUT);
                }
                assert!(panics != Some(rank), "diverged");
            }
            let (tokens, labels) = batch(step, 0..2, worker.device());
            let gradients = net.backward(loss(net.forward(tokens), labels))?;
            net = optimizer.step(1e-4, net, gradients);
            println!("\nrank {rank} took step {step}");
        }
        Ok::<_, Error>(())
    });
    let error = outcome.unwrap_err();
    // Written at once: the ranks write to one terminal.
    let line = format!("\n{error}\n");
    eprint!("{line}");
    let source = error.source.downcast_ref::<Error>();
    let typed = match source {
        Some(Error::Collective(CollectiveError::Timeout { missing, .. })) => {
            missing.contains(&error.rank)
        }
        Some(Error::Collective(CollectiveError::PeerFailed { rank, .. })) => *rank == error.rank,
        Some(_) => false,
        None => true,
    };
    assert!(typed && error.source.downcast_ref::<EngineError>().is_none(), "{error}");
    // The exit code of a program whose `main` returns the error.
    std::process::exit(1);
}

#[test]
#[ignore = "the program of a rank"]
fn rank_with_a_seed_of_its_own() {
    let outcome = launch(LaunchOptions::new(3).with_timeout(TIMEOUT), |worker| {
        let options = FsdpOptions::new().with_seed(u64::from(worker.rank().index() > 0));
        let error = fully_shard(Net::new(1, 0.0, worker.device()), &worker, options).unwrap_err();
        assert!(matches!(error, Error::Shard(ShardError::ModelMismatch { .. })), "{error}");
        let line = format!("\n{error}\n");
        print!("{line}");
        Ok::<_, Error>(())
    });
    outcome.unwrap();
}

/// Layers that count how often their parameters are initialised.
#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Counted {
    /// An ignored layer, which some ranks do not have.
    other: Option<Linear>,
    layers: Vec<Linear>,
}

#[fsdp_unit]
impl Counted {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.layers.iter().fold(x, |x, layer| layer.forward(x))
    }
}

impl Counted {
    fn new(width: usize, device: &Device, drawn: &Arc<AtomicUsize>) -> Self {
        let layer = |_| {
            let Linear { weight, bias } = LinearConfig::new(width, width).init(device);
            let shape = weight.lazy_shape();
            let bias = bias.map(|bias| counted(bias.lazy_shape(), bias, drawn));
            Linear { weight: counted(shape, weight, drawn), bias }
        };
        Self { other: None, layers: (0..6).map(layer).collect() }
    }

    /// Returns a fingerprint of all weights. A collective: every rank must call it.
    fn values(&self) -> u64 {
        let weights = self.layers.iter().enumerate();
        let weights = weights.map(|(at, layer)| (at.to_string(), layer.weight.val().into_data()));
        fingerprint(&weights.collect())
    }
}

/// Returns a parameter that is initialised to random values of `shape`, and counts that.
fn counted<const D: usize>(
    shape: Shape,
    param: Param<Tensor<D>>,
    drawn: &Arc<AtomicUsize>,
) -> Param<Tensor<D>> {
    let (declared, device, drawn) = (param.lazy_shape(), param.lazy_device(), drawn.clone());
    let draw = move |device: &Device, tracked| {
        drawn.fetch_add(1, SeqCst);
        let tensor = Tensor::random(shape, Distribution::Default, device);
        tensor.set_require_grad(tracked)
    };
    Param::uninitialized(param.id, draw, device, true, declared)
}

#[test]
#[ignore = "the program of a rank"]
fn rank_that_counts_what_it_draws() {
    let place = fsdp_runtime::launch::env::RankEnv::read().unwrap().expect("started by mpirun");
    let threads = if place.rank.index() == 3 { 1 } else { 2 };
    let options = LaunchOptions::new(4).with_engine(Engine::Mpi).with_timeout(TIMEOUT);
    launch(options.with_threads_per_rank(threads), |worker| {
        let (rank, device) = (worker.rank().index(), worker.device());
        let seeded = FsdpOptions::new().with_seed(3);
        for (what, options) in [
            ("seeded", seeded.clone()),
            ("unseeded", FsdpOptions::new()),
            ("whole", seeded.clone().with_strategy(ShardingStrategy::NoShard)),
            ("a layer of rank 0 alone", seeded.clone()),
            ("a value of rank 0", seeded.clone()),
        ] {
            let drawn = Arc::new(AtomicUsize::new(0));
            let mut model = Counted::new(if what == "whole" { 300 } else { 30 }, device, &drawn);
            let mut options = options;
            match (what, rank) {
                ("a layer of rank 0 alone", 0) => {
                    let other = LinearConfig::new(5, 5).with_bias(false).init(device);
                    options = options.with_ignored_params([other.weight.id]);
                    model.other = Some(other);
                }
                ("a value of rank 0", 0) => {
                    model.layers[0].weight.val();
                    drawn.store(0, SeqCst);
                }
                _ => {}
            }
            let model = fully_shard(model, &worker, options)?;
            println!("\n{what}: rank {rank} drew {}", drawn.load(SeqCst));
            println!("\n{what}: the values {:x}", model.values());
        }
        Ok::<_, Error>(())
    })
    .unwrap();
}

#[test]
#[ignore = "the program of a rank"]
fn rank_that_draws_another_shape() {
    let options = LaunchOptions::new(3)
        .with_engine(Engine::Mpi)
        .with_timeout(TIMEOUT)
        .with_threads_per_rank(2);
    let ended: Result<Vec<()>, LaunchError> = launch(options, |worker| {
        let mut model = Counted::new(30, worker.device(), &Arc::default());
        let weight = model.layers[1].weight.clone();
        model.layers[1].weight = counted([30, 31].into(), weight, &Arc::default());
        let error = fully_shard(model, &worker, FsdpOptions::new().with_seed(3)).unwrap_err();
        match worker.rank().index() {
            1 => {
                let own = matches!(error, Error::Shard(ShardError::InitShape { .. }));
                println!("\nrank 1 found it itself: {own}");
            }
            rank => println!("\nrank {rank} has the error: {error}"),
        }
        Err(error)
    });
    assert!(ended.is_err());
    std::process::exit(1);
}
