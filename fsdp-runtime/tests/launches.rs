//! Kernel launches of a training step on CubeCL's CPU device, by kernel and phase.
//!
//! A binary of its own: an observer sees the launches of the whole process.
#![cfg(feature = "cpu")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, FloatDType, Tensor};
use cubecl_runtime::logging::{LaunchObservation, LaunchObserver};
use fsdp_runtime::Error;
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;

const BLOCKS: usize = 3;
const WIDTH: usize = 64;
const STEPS: usize = 3;

/// No matrix product, of which CubeCL would compile and time many variants.
#[derive(Module, Debug)]
#[fsdp_unit]
struct Block {
    weight: Param<Tensor<2>>,
    scale: Param<Tensor<1>>,
    shift: Param<Tensor<1>>,
}

#[fsdp_unit]
impl Block {
    /// `[rows, width]` to `[rows, width]`. Reads each vector twice.
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let once = |x: Tensor<2>| {
            x * self.scale.val().unsqueeze::<2>() + self.shift.val().unsqueeze::<2>()
        };
        once(once(x) * self.weight.val()).tanh()
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Stack {
    blocks: Vec<Block>,
}

#[fsdp_unit]
impl Stack {
    fn forward(&self, x: Tensor<2>) -> Tensor<1> {
        self.blocks.iter().fold(x, |x, block| block.forward(x)).mean()
    }
}

fn stack(device: &Device) -> Stack {
    let block = |_| Block {
        weight: Initializer::Constant { value: 0.5 }.init([WIDTH, WIDTH], device),
        scale: Initializer::Ones.init([WIDTH], device),
        shift: Initializer::Zeros.init([WIDTH], device),
    };
    Stack { blocks: (0..BLOCKS).map(block).collect() }
}

/// Launches of each kernel: by communication threads, and by all others.
#[derive(Clone, Debug, Default)]
struct Launches {
    comm: BTreeMap<String, usize>,
    own: BTreeMap<String, usize>,
}

impl Launches {
    /// Returns the launches of the kernel that copies, casts and waits for fences.
    fn packs(&self) -> usize {
        let is_pack = |(kernel, _): &(&String, &usize)| kernel.contains("PackKernel");
        self.own.iter().filter(is_pack).map(|(_, count)| count).sum()
    }
}

#[derive(Default)]
struct Observer(Mutex<Launches>);

impl LaunchObserver for Observer {
    fn launched(&self, kernel: &'static str) {
        let thread = std::thread::current();
        let is_comm = thread.name().is_some_and(|name| name.starts_with("fsdp-comm"));
        let mut launches = self.0.lock().expect("no thread panics under the lock");
        let kernels = if is_comm { &mut launches.comm } else { &mut launches.own };
        *kernels.entry(kernel.to_string()).or_default() += 1;
    }
}

/// Runs `phase` on all ranks, and returns the launches of all ranks in it.
fn observe<T>(
    worker: &Worker,
    phase: impl FnOnce() -> Result<T, Error>,
) -> Result<(T, Launches), Error> {
    worker.barrier()?;
    let observer = Arc::new(Observer::default());
    let first = worker.is_rank_zero();
    let observation = first.then(|| LaunchObservation::new(observer.clone()));
    worker.barrier()?;
    let result = phase()?;
    worker.device().sync().expect("the device has run its work");
    worker.barrier()?;
    drop(observation);
    let launches = observer.0.lock().expect("no thread panics under the lock").clone();
    Ok((result, launches))
}

/// What rank 0 saw in the last of several steps.
#[derive(Clone, Debug)]
struct Step {
    loss: u32,
    forward: Launches,
    backward: Launches,
    optimizer: Launches,
    /// All-gathers of units.
    all_gathers: usize,
}

fn train(worker: &Worker, options: &FsdpOptions) -> Result<Step, Error> {
    let device = worker.device();
    let rows = 2 + worker.rank().index();
    let input = Tensor::<2>::ones([WIDTH, WIDTH], device) * (0.1 * rows as f32);
    let mut model = Some(fully_shard(stack(device), worker, options.clone())?);
    let mut optimizer = AdamWConfig::new().init();
    let mut last = None;
    for _ in 0..STEPS {
        let sharded = model.take().expect("each step puts the model back");
        let before = sharded.stats().counts().all_gathers;
        let (output, forward) = observe(worker, || Ok(sharded.forward(input.clone())))?;
        let loss = output.clone();
        let (gradients, backward) = observe(worker, || sharded.backward(output))?;
        let all_gathers = sharded.stats().counts().all_gathers - before;
        let (sharded, optimizer) =
            observe(worker, || Ok(optimizer.step(1e-2, sharded, gradients)))?;
        let loss = loss.into_data().iter::<f32>().next().expect("one element").to_bits();
        last = Some(Step { loss, forward, backward, optimizer, all_gathers });
        model = Some(sharded);
    }
    Ok(last.expect("there are steps"))
}

fn run(world: usize, options: FsdpOptions) -> Step {
    let launched = LaunchOptions::new(world).with_device(Device::cpu());
    let ranks = launch(launched, move |worker| train(&worker, &options));
    let step = ranks.expect("the run succeeds").swap_remove(0);
    println!("{world} ranks: {step:#?}");
    step
}

fn plain() -> FsdpOptions {
    // The steps of the check are launches too.
    FsdpOptions::new().with_optimizer_check(false)
}

/// One rank's shards are the whole parameters: nothing is copied, and the loss has the same bits as
/// with replicated parameters.
#[test]
fn a_single_rank_copies_nothing() {
    let full = run(1, plain());
    assert_eq!(full.all_gathers, 0);
    for phase in [&full.forward, &full.backward, &full.optimizer] {
        assert_eq!(phase.packs(), 0, "{phase:?}");
        assert!(phase.comm.is_empty(), "{phase:?}");
    }
    let replicated = run(1, plain().with_strategy(ShardingStrategy::NoShard));
    assert_eq!(full.loss, replicated.loss);
    let kernels = |step: &Step| (step.forward.own.clone(), step.optimizer.own.clone());
    assert_eq!(kernels(&full), kernels(&replicated));
}

/// Each rank's own thread gathers, and updates its shards in their own memory: no rank refers to
/// another one's shards any more.
#[test]
fn ranks_that_share_a_device_gather_without_their_communication_threads() {
    const WORLD: usize = 2;
    let step = run(WORLD, plain());
    // The last block stays gathered from forward to backward.
    assert_eq!(step.all_gathers, 2 * BLOCKS - 1);
    // A rank's own thread also waits for the fence of the exchange.
    assert_eq!(step.forward.packs(), WORLD * (BLOCKS + 1), "{:?}", step.forward);
    assert_eq!(step.optimizer.packs(), 0, "{:?}", step.optimizer);
    // A communication thread waits for the fences of its own rank and of the other one.
    assert_eq!(step.forward.comm.values().sum::<usize>(), WORLD * WORLD, "{:?}", step.forward);
}

/// The vectors of a block are cast together, once in a forward, though each is read twice.
#[test]
fn the_vectors_of_a_unit_are_cast_in_one_launch() {
    let policy = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::F16);
    let step = run(1, plain().with_mixed_precision(policy));
    assert_eq!(step.all_gathers, 2 * BLOCKS - 1);
    // A gather and a cast for each block.
    assert_eq!(step.forward.packs(), 2 * BLOCKS, "{:?}", step.forward);
}
