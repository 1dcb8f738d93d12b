//! `test_fully_shard_comm`: the number of collectives, and their order.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use fsdp_runtime::__private::FlatLayout;
use fsdp_runtime::WorldSize;
use fsdp_runtime::prelude::*;

use super::mlp::{Block, HIDDEN, WIDTH, input, loss, of_rank_0, on_ranks, sharded};
use super::support::trace::{only, record};

const STEPS: [&str; 6] =
    ["unshard", "wait_for_unshard", "reshard", "pre_backward", "post_backward", "reduce"];

/// Returns the second step of three blocks on two ranks: lines of its forward and of its backward.
fn trace(options: FsdpOptions) -> (Vec<String>, Vec<String>) {
    let traces = on_ranks(2, move |worker| {
        let model = sharded(3, worker, options.clone())?;
        let x = || input(worker.rank().index(), 0, 4, worker.device());
        model.backward(loss(model.forward(x())))?;
        let (output, forward) = record(|| loss(model.forward(x())));
        let (gradients, backward) = record(|| model.backward(output));
        gradients?;
        Ok((forward, backward))
    });
    assert_eq!(traces[0], traces[1], "every rank has the same schedule");
    let (forward, backward) = traces.into_iter().next().unwrap();
    (only(&forward, &STEPS), only(&backward, &STEPS))
}

#[test]
fn forward_order_with_prefetch() {
    let (forward, _) = trace(FsdpOptions::new());
    let expected = [
        "unshard (root)",
        "wait_for_unshard (root)",
        "unshard blocks.0",
        "wait_for_unshard blocks.0",
        "unshard blocks.1",
        "reshard blocks.0",
        "wait_for_unshard blocks.1",
        "unshard blocks.2",
        "reshard blocks.1",
        "wait_for_unshard blocks.2",
    ];
    assert_eq!(forward, expected, "the last block and the root stay gathered for their backward");
}

#[test]
fn forward_order_without_prefetch() {
    let (forward, _) = trace(FsdpOptions::new().with_forward_prefetch(false));
    let expected = [
        "unshard (root)",
        "wait_for_unshard (root)",
        "unshard blocks.0",
        "wait_for_unshard blocks.0",
        "reshard blocks.0",
        "unshard blocks.1",
        "wait_for_unshard blocks.1",
        "reshard blocks.1",
        "unshard blocks.2",
        "wait_for_unshard blocks.2",
    ];
    assert_eq!(forward, expected);
}

/// Removes the root's lines. The root's gradients arrive with the first block's, in no fixed order,
/// because no tracked input comes before either.
fn without_root(lines: Vec<String>) -> Vec<String> {
    assert_eq!(lines.iter().filter(|line| *line == "reduce (root)").count(), 1, "{lines:?}");
    lines.into_iter().filter(|line| !line.ends_with("(root)")).collect()
}

/// PyTorch's order: unshard 2, which stays gathered here, unshard 1, post 2, unshard 0, post 1,
/// post 0.
#[test]
fn backward_order_with_prefetch_before() {
    let (_, backward) = trace(FsdpOptions::new());
    assert_eq!(backward[0], "pre_backward (root)");
    assert_eq!(backward.last().map(String::as_str), Some("reshard (root)"));
    let backward = without_root(backward);
    let expected = [
        "pre_backward blocks.2",
        "unshard blocks.1",
        "post_backward blocks.2",
        "reshard blocks.2",
        "reduce blocks.2",
        "pre_backward blocks.1",
        "wait_for_unshard blocks.1",
        "unshard blocks.0",
        "post_backward blocks.1",
        "reshard blocks.1",
        "reduce blocks.1",
        "pre_backward blocks.0",
        "wait_for_unshard blocks.0",
        "post_backward blocks.0",
        "reshard blocks.0",
        "reduce blocks.0",
    ];
    assert_eq!(backward, expected);
}

#[test]
fn backward_order_with_prefetch_after() {
    let (_, backward) = trace(FsdpOptions::new().with_backward_prefetch(BackwardPrefetch::Post));
    let unshard = without_root(only(&backward, &["unshard", "post_backward", "reduce"]));
    let expected = [
        "post_backward blocks.2",
        "unshard blocks.1",
        "reduce blocks.2",
        "post_backward blocks.1",
        "unshard blocks.0",
        "reduce blocks.1",
        "post_backward blocks.0",
        "reduce blocks.0",
    ];
    assert_eq!(unshard, expected);
}

#[test]
fn backward_order_without_prefetch() {
    let (_, backward) = trace(FsdpOptions::new().with_backward_prefetch(BackwardPrefetch::None));
    let unshard = only(&backward, &["unshard", "pre_backward"]);
    let expected = [
        "pre_backward (root)",
        "pre_backward blocks.2",
        "pre_backward blocks.1",
        "unshard blocks.1",
        "pre_backward blocks.0",
        "unshard blocks.0",
    ];
    assert_eq!(unshard, expected);
}

#[test]
fn communication_count() {
    let counts = |options: FsdpOptions| {
        on_ranks(2, move |worker| {
            let model = sharded(3, worker, options.clone())?;
            let x = input(worker.rank().index(), 0, 4, worker.device());
            model.backward(loss(model.forward(x)))?;
            Ok(model.stats().counts())
        })[0]
    };
    let full = counts(FsdpOptions::new());
    assert_eq!((full.all_gathers, full.reduce_scatters), (4 + 2, 4));
    let zero2 = counts(FsdpOptions::new().with_strategy(ShardingStrategy::ShardGradOp));
    assert_eq!((zero2.all_gathers, zero2.reduce_scatters), (4, 4));
    let none = counts(FsdpOptions::new().with_strategy(ShardingStrategy::NoShard));
    assert_eq!((none.all_gathers, none.reduce_scatters), (0, 4));
}

#[test]
fn world_size_1() {
    let outcome = on_ranks(1, |worker| {
        let model = sharded(2, worker, FsdpOptions::new())?;
        let output = loss(model.forward(input(0, 0, 4, worker.device())));
        let value = output.clone().into_scalar::<f32>();
        let norm = model.clip_grad_norm(&mut model.backward(output)?, 1e9)?;
        Ok((value, norm, model.stats().counts().reduce_scatters))
    });
    let (value, norm, reductions) = outcome[0];
    assert!(value > 0.0 && norm > 0.0);
    assert_eq!(reductions, 3);
}

/// The layout alone: no test can start as many ranks.
#[test]
fn world_size_128() {
    let world = WorldSize::new(128).unwrap();
    let layout = FlatLayout::new([WIDTH * HIDDEN, HIDDEN * WIDTH, 3], world);
    for matrix in 0..layout.len() {
        let held: usize = world.ranks().map(|rank| layout.shard_of(matrix, rank).len()).sum();
        assert_eq!(held, layout.segment(matrix).len());
        assert!(held > 0);
    }
    assert_eq!(layout.len(), 3);
}

/// Gradients are means over all ranks, whatever the mesh.
#[test]
fn divide_factor() {
    for (strategy, size) in [
        (ShardingStrategy::FullShard, 4),
        (ShardingStrategy::HybridShard, 2),
        (ShardingStrategy::NoShard, 4),
    ] {
        let sums = on_ranks(4, move |worker| {
            let options = FsdpOptions::new().with_strategy(strategy).with_shard_size(size);
            let model = sharded(1, worker, options)?;
            let bias = model.head.bias.as_ref().expect("with a bias").id;
            // The gradient of the bias is the number of the rank: 0, 1, 2 or 3.
            let scale = worker.rank().index() as f32;
            let output = model.forward(input(0, 0, 1, worker.device())).sum() * scale;
            let gradients = model.backward(output)?;
            Ok(gradients.get::<1>(bias).expect("used").into_data().iter::<f32>().next())
        });
        assert!(sums.iter().all(|&sum| sum == Some(1.5)), "{strategy}: {sums:?}");
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Switching {
    blocks: Vec<Block>,
    head: Linear,
}

#[fsdp_unit]
impl Switching {
    fn forward(&self, x: Tensor<2>, order: &[usize]) -> Tensor<2> {
        let x = order.iter().fold(x, |x, &index| self.blocks[index].forward(x));
        self.head.forward(x)
    }
}

fn switching(device: &Device) -> Switching {
    Switching {
        blocks: (0..4).map(|_| Block::new(device)).collect(),
        head: LinearConfig::new(WIDTH, 3).init(device),
    }
}

/// A unit that is skipped, used twice or used in another order than before costs one more
/// all-gather.
#[test]
fn mis_prefetch() {
    const ORDERS: [&[usize]; 6] =
        [&[0, 1, 2, 3], &[0, 2, 3], &[3, 2, 1, 0], &[1, 1, 0], &[0, 1, 2, 3], &[2, 0, 2]];
    let run = |options: FsdpOptions| {
        of_rank_0(2, move |worker| {
            let model =
                fully_shard(switching(worker.device()), worker, options.clone().with_seed(3))?;
            let mut norms = Vec::new();
            let mut extra = 0;
            for (step, order) in ORDERS.iter().enumerate() {
                let before = model.stats().counts();
                let x = input(worker.rank().index(), step, 4, worker.device());
                let output = loss(model.forward(x, order));
                let mut gradients = model.backward(output)?;
                norms.push(model.clip_grad_norm(&mut gradients, 1e9)?.to_bits());
                let after = model.stats().counts();
                let wrong = after.mis_prefetches - before.mis_prefetches;
                // One for each forward and each backward of a block, and one for the root.
                let most = 2 * order.len() + 1 + wrong;
                assert!(after.all_gathers - before.all_gathers <= most, "{order:?}: {after:?}");
                extra += wrong;
            }
            Ok((norms, extra))
        })
    };
    let (expected, _) = run(FsdpOptions::new().with_strategy(ShardingStrategy::NoShard));
    assert!(expected.iter().all(|&norm| f64::from_bits(norm) > 0.0), "every step has gradients");
    let (norms, wrong) = run(FsdpOptions::new());
    assert_eq!(norms, expected);
    assert!(wrong > 0, "the orders mislead the prefetch");
    let (norms, wrong) = run(FsdpOptions::new()
        .with_forward_prefetch(false)
        .with_backward_prefetch(BackwardPrefetch::None));
    assert_eq!((norms, wrong), (expected, 0));
}
