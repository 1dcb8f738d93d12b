//! `test_fully_shard_memory`: bounds on memory at each point of a step, by the runtime's
//! accounting.

use burn::optim::{AdamWConfig, ModuleOptimizer};
use fsdp_runtime::memory::Memory;
use fsdp_runtime::optim;
use fsdp_runtime::prelude::*;

use super::mlp::{HIDDEN, WIDTH, input, loss, of_rank_0, on_ranks, sharded};

const BLOCKS: usize = 6;
const FLOAT: usize = size_of::<f32>();
/// Bytes of the matrices of a block.
const MATRICES: usize = 2 * WIDTH * HIDDEN * FLOAT;
/// Bytes of the parameters of a block.
const BLOCK: usize = MATRICES + (WIDTH + HIDDEN) * FLOAT;
/// Bytes of the parameters that are in no block, with the padding of their buffer.
const NON_BLOCK: usize = (WIDTH * 3 + 3 + 64) * FLOAT;

/// The accounting of rank 0 after each phase of a step.
struct Counted {
    start: Memory,
    forward: Memory,
    backward: Memory,
    optimizer: Memory,
}

fn counted(options: FsdpOptions) -> Counted {
    of_rank_0(2, move |worker| {
        let mut model = sharded(BLOCKS, worker, options.clone())?;
        let start = model.stats().memory();
        let output = loss(model.forward(input(worker.rank().index(), 0, 4, worker.device())));
        let forward = model.stats().memory();
        let gradients = model.backward(output)?;
        let backward = model.stats().memory();
        let mut adam = AdamWConfig::new().init();
        model = adam.step(1e-3, model, gradients);
        model.stats().record_optimizer(&adam).expect("a record");
        Ok(Counted { start, forward, backward, optimizer: model.stats().memory() })
    })
}

/// Returns the bytes of the parameters that a rank holds between steps.
fn held(memory: &Memory) -> usize {
    memory.shards.now + memory.replicated.now
}

#[test]
fn after_construction_there_are_shards_and_two_gather_buffers() {
    let Counted { start, .. } = counted(FsdpOptions::new());
    let whole = BLOCKS * BLOCK + (WIDTH * 3 + 3) * FLOAT;
    let matrices = BLOCKS * MATRICES + WIDTH * 3 * FLOAT;
    assert_eq!(start.shards.now, matrices / 2);
    assert_eq!(start.replicated.now, whole - matrices);
    let bound = held(&start) + 2 * BLOCK + NON_BLOCK;
    assert!((held(&start)..=bound).contains(&start.total.peak), "{start}");
}

#[test]
fn the_peak_of_forward_is_that_of_shards_and_two_blocks() {
    let Counted { forward, .. } = counted(FsdpOptions::new());
    let bound = held(&forward) + 2 * BLOCK + NON_BLOCK;
    assert!((held(&forward) + BLOCK..=bound).contains(&forward.total.peak), "{forward} {bound}");
}

#[test]
fn the_peak_of_backward_adds_the_gradients_of_all_shards_and_of_one_block() {
    let Counted { backward, .. } = counted(FsdpOptions::new());
    let bound = 2 * held(&backward) + 2 * BLOCK + BLOCK + 2 * NON_BLOCK;
    assert!(backward.total.peak <= bound, "{backward} {bound}");
    assert!(backward.gradients.peak > held(&backward), "full gradients are counted: {backward}");
    assert_eq!(backward.gradients.now, held(&backward), "the reduced gradients of all shards");
}

#[test]
fn after_a_step_of_adam_there_are_four_times_the_shards() {
    let Counted { optimizer, .. } = counted(FsdpOptions::new().with_optimizer_check(false));
    let states = optimizer.total.now - optimizer.gathered.now;
    // The record holds names as well.
    let names = BLOCKS * 8 * 1024;
    let expected = 4 * held(&optimizer);
    assert!(expected > BLOCKS * BLOCK, "{optimizer}");
    assert!((expected..expected + names).contains(&states), "{optimizer}");
}

#[test]
fn shard_grad_op_has_a_gather_buffer_for_every_unit() {
    let options = FsdpOptions::new().with_strategy(ShardingStrategy::ShardGradOp);
    let Counted { start, .. } = counted(options);
    assert!(start.gathered.now >= BLOCKS * MATRICES);
    let none = counted(FsdpOptions::new().with_strategy(ShardingStrategy::NoShard)).start;
    assert_eq!((none.gathered.peak, none.shards.now), (0, 0));
}

#[test]
fn reduced_gradients_count_until_the_next_forward() {
    let gradients = on_ranks(2, |worker| {
        let model = sharded(BLOCKS, worker, FsdpOptions::new())?;
        let x = || input(worker.rank().index(), 0, 4, worker.device());
        model.backward(loss(model.forward(x())))?;
        let before = model.stats().memory().gradients.now;
        let valid = model.valid();
        let device = worker.device().clone().inner();
        valid.forward(input(0, 0, 4, &device));
        Ok((before > 0, model.stats().memory().gradients.now))
    });
    assert_eq!(gradients, [(true, 0); 2]);
}

/// Trains three steps. Returns the accounting after each, and what the optimizer's state measures at the end.
fn with_optimizer(
    options: FsdpOptions,
    optimizer: fn() -> ModuleOptimizer,
) -> (Vec<Memory>, Memory) {
    of_rank_0(2, move |worker| {
        let mut model = sharded(2, worker, options.clone())?;
        let mut optimizer = optimizer();
        let mut memory = Vec::new();
        for step in 0..3 {
            let x = input(worker.rank().index(), step, 4, worker.device());
            let gradients = model.backward(loss(model.forward(x)))?;
            model = optimizer.step(1e-3, model, gradients);
            memory.push(model.stats().memory());
        }
        model.stats().record_optimizer(&optimizer)?;
        Ok((memory, model.stats().memory()))
    })
}

#[test]
fn optimizers_of_this_crate_report_their_state() {
    let optimizers: [fn() -> ModuleOptimizer; 5] = [
        || optim::AdamWConfig::new().init(),
        || optim::AdamConfig::new().with_amsgrad(true).init(),
        || optim::SgdConfig::new().with_momentum(0.9).init(),
        || optim::SgdConfig::new().init(),
        || optim::AdadeltaConfig::new().init(),
    ];
    for optimizer in optimizers {
        for options in [
            FsdpOptions::new(),
            FsdpOptions::new().with_strategy(ShardingStrategy::NoShard),
            FsdpOptions::new().with_optimizer_check(false),
        ] {
            let (reported, measured) = with_optimizer(options, optimizer);
            let last = reported.last().expect("three steps");
            assert_eq!(last.optimizer.now, measured.optimizer.now, "{last}");
            assert!(reported.iter().all(|memory| !memory.lacks_optimizer));
            assert!(!last.to_string().contains("not recorded"));
        }
    }
    let (adam, _) = with_optimizer(FsdpOptions::new().with_optimizer_check(false), optimizers[0]);
    assert_eq!(adam[0].optimizer.now, 2 * held(&adam[0]), "two moments of each element");
}

#[test]
fn the_state_of_another_optimizer_is_said_to_be_missing_until_it_is_recorded() {
    let (reported, measured) = with_optimizer(FsdpOptions::new(), || AdamWConfig::new().init());
    for memory in &reported {
        assert!(memory.lacks_optimizer && memory.optimizer.now == 0);
        let text = memory.to_string();
        assert!(
            text.contains("not recorded: call `stats().record_optimizer(&optimizer)`"),
            "{text}"
        );
    }
    assert!(!measured.lacks_optimizer && measured.optimizer.now > 0, "{measured}");
}
