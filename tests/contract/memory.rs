//! `test_fully_shard_memory`: the bounds of the design, by the runtime's own count.

use burn::optim::AdamWConfig;
use fsdp_runtime::Memory;
use fsdp_runtime::prelude::*;

use super::mlp::{HIDDEN, WIDTH, input, loss, on, sharded};

const BLOCKS: usize = 6;
const FLOAT: usize = size_of::<f32>();
/// Matrices of a block, and with its vectors.
const MATRICES: usize = 2 * WIDTH * HIDDEN * FLOAT;
const BLOCK: usize = MATRICES + (WIDTH + HIDDEN) * FLOAT;
/// What is in no block, with the padding of its buffer.
const NON_BLOCK: usize = (WIDTH * 3 + 3 + 64) * FLOAT;

struct Counted {
    start: Memory,
    forward: Memory,
    backward: Memory,
    optimizer: Memory,
}

fn counted(options: FsdpOptions) -> Counted {
    on(2, move |worker| {
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
    .swap_remove(0)
}

fn held(memory: &Memory) -> usize {
    memory.shards.now + memory.replicated.now
}

#[test]
fn after_construction_sharded_and_two_slots() {
    let Counted { start, .. } = counted(FsdpOptions::new());
    let whole = BLOCKS * BLOCK + (WIDTH * 3 + 3) * FLOAT;
    let matrices = BLOCKS * MATRICES + WIDTH * 3 * FLOAT;
    assert_eq!(start.shards.now, matrices / 2);
    assert_eq!(start.replicated.now, whole - matrices);
    assert!(start.total.peak <= held(&start) + 2 * BLOCK + NON_BLOCK);
}

#[test]
fn forward_peak_sharded_and_two_blocks() {
    let Counted { forward, .. } = counted(FsdpOptions::new());
    assert!(forward.total.peak <= held(&forward) + 2 * BLOCK + NON_BLOCK, "{forward}");
}

#[test]
fn backward_peak_twice_sharded_two_blocks_and_one_of_gradients() {
    let Counted { backward, .. } = counted(FsdpOptions::new());
    let bound = 2 * held(&backward) + 2 * BLOCK + BLOCK + 2 * NON_BLOCK;
    assert!(backward.total.peak <= bound, "{backward} {bound}");
    assert!(backward.gradients.peak > held(&backward), "full gradients are counted: {backward}");
    assert_eq!(backward.gradients.now, held(&backward), "reduced gradients of all that is held");
}

#[test]
fn after_adam_four_times_sharded() {
    let Counted { optimizer, .. } = counted(FsdpOptions::new());
    let states = optimizer.total.now - optimizer.gathered.now;
    // The record names each parameter.
    let names = BLOCKS * 8 * 1024;
    let expected = 4 * held(&optimizer);
    assert!((expected..expected + names).contains(&states), "{optimizer}");
}

#[test]
fn shard_grad_op_holds_every_unit() {
    let options = FsdpOptions::new().with_strategy(ShardingStrategy::ShardGradOp);
    let Counted { start, .. } = counted(options);
    assert!(start.gathered.now >= BLOCKS * MATRICES);
    let none = counted(FsdpOptions::new().with_strategy(ShardingStrategy::NoShard)).start;
    assert_eq!((none.gathered.peak, none.shards.now), (0, 0));
}

#[test]
fn reduced_gradients_count_until_the_next_forward() {
    let now = on(2, |worker| {
        let model = sharded(BLOCKS, worker, FsdpOptions::new())?;
        let x = || input(worker.rank().index(), 0, 4, worker.device());
        model.backward(loss(model.forward(x())))?;
        let valid = model.valid();
        let device = worker.device().clone().inner();
        valid.forward(input(0, 0, 4, &device));
        Ok(model.stats().memory().gradients.now)
    });
    assert_eq!(now, [0, 0]);
}
