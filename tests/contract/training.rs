//! `test_fully_shard_training`: parity with data-parallel training under delays, accumulation, tied
//! weights, hybrid meshes and several models.

use std::time::Duration;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor};
use fsdp_runtime::model::Counts;
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use super::mlp::{
    Block, Mlp, WIDTH, full_gradient, gradient, input, loss, of_rank_0, on_ranks, sharded,
};
use super::support::compare::{
    Parameters, Within, assert_close, assert_parameters_close, assert_same_state,
};

/// Ten steps, in which each rank is late at places of its own.
#[test]
fn train_parity_with_ddp_under_delays() {
    let run = |strategy, delays: bool| {
        on_ranks(3, move |worker| {
            let mut model = sharded(3, worker, FsdpOptions::new().with_strategy(strategy))?;
            let mut optimizer = AdamWConfig::new().init();
            let rank = worker.rank().index();
            let mut losses = Vec::new();
            for step in 0..10 {
                let delay = |at: usize| {
                    if delays && (step + at + rank).is_multiple_of(4) {
                        std::thread::sleep(Duration::from_millis(3 * (rank as u64 + 1)));
                    }
                };
                delay(0);
                let output = loss(model.forward(input(rank, step, 4, worker.device())));
                delay(1);
                losses.push(output.clone().into_scalar::<f32>().to_bits());
                let gradients = model.backward(output)?;
                delay(2);
                model = optimizer.step(1e-2, model, gradients);
            }
            Ok(losses)
        })
    };
    let expected = run(ShardingStrategy::NoShard, false);
    assert_eq!(run(ShardingStrategy::FullShard, true), expected);
    assert_eq!(run(ShardingStrategy::ShardGradOp, true), expected);
}

#[test]
fn several_forwards_before_backward() {
    let run = |strategy| {
        of_rank_0(2, move |worker| {
            let model = sharded(3, worker, FsdpOptions::new().with_strategy(strategy))?;
            let rank = worker.rank().index();
            let x = |step| input(rank, step, 4, worker.device());
            let output = loss(model.forward(x(0))) + loss(model.forward(x(1)));
            let mut both = model.backward(output)?;
            let both = model.clip_grad_norm(&mut both, 1e9)?;
            // The second backward runs while the graph of the first is still alive.
            let (first, second) = (loss(model.forward(x(0))), loss(model.forward(x(1))));
            model.accumulate(second)?;
            let mut apart = model.backward(first)?;
            let apart = model.clip_grad_norm(&mut apart, 1e9)?;
            Ok((both.to_bits(), apart.to_bits(), model.stats().counts().reduce_scatters))
        })
    };
    let none = run(ShardingStrategy::NoShard);
    let full = run(ShardingStrategy::FullShard);
    assert_eq!(full, none);
    let (both, apart) = (f64::from_bits(full.0), f64::from_bits(full.1));
    assert!((both - apart).abs() < 1e-6 * both, "{both} {apart}");
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Gated {
    blocks: Vec<Block>,
    head: Linear,
}

#[fsdp_unit]
impl Gated {
    fn forward(&self, x: Tensor<2>, used: &[bool]) -> Tensor<2> {
        let blocks = self.blocks.iter().zip(used).filter(|(_, used)| **used);
        self.head.forward(blocks.fold(x, |x, (block, _)| block.forward(x)))
    }
}

/// A unit that a step leaves out has no gradient in that step, and has one in the next.
#[test]
fn unused_unit() {
    let ranks = on_ranks(2, |worker| {
        let device = worker.device();
        let model = Gated {
            blocks: (0..3).map(|_| Block::new(device)).collect(),
            head: LinearConfig::new(WIDTH, 3).init(device),
        };
        let mut model = fully_shard(model, worker, FsdpOptions::new().with_seed(5))?;
        let mut optimizer = SgdConfig::new().init();
        let mut found = Vec::new();
        for used in [[true, false, true], [true, true, true], [false, false, false]] {
            let x = input(worker.rank().index(), 0, 4, device);
            let gradients = model.backward(loss(model.forward(x, &used)))?;
            let has = |block: &Block| gradients.get::<2>(block.up.weight.id).is_some();
            found.push((used, model.blocks.iter().map(has).collect::<Vec<_>>()));
            model = optimizer.step(1e-2, model, gradients);
        }
        Ok(found)
    });
    for (used, found) in &ranks[0] {
        assert_eq!(used.as_slice(), found);
    }
}

/// The parameters of rank 0 after two steps of three micro-batches, and what they took.
struct Accumulated {
    state: FullState,
    counts: Counts,
    /// Peak bytes of gradients.
    gradients: usize,
}

fn accumulated(accumulation: GradientAccumulation, strategy: ShardingStrategy) -> Accumulated {
    of_rank_0(2, move |worker| {
        let options =
            FsdpOptions::new().with_strategy(strategy).with_gradient_accumulation(accumulation);
        let mut model = sharded(3, worker, options)?;
        let mut optimizer = SgdConfig::new().init();
        for step in 0..2 {
            let micro = |at: usize| {
                let rank = worker.rank().index();
                loss(model.forward(input(rank, 3 * step + at, 4, worker.device()))) / 3.0
            };
            model.accumulate(micro(0))?;
            model.accumulate(micro(1))?;
            let gradients = model.backward(micro(2))?;
            model = optimizer.step(1e-1, model, gradients);
        }
        let state = model.state().full(Recipient::All)?;
        let gradients = model.stats().memory().gradients.peak;
        Ok(Accumulated { state, counts: model.stats().counts(), gradients })
    })
}

/// Gradients are reduced after each micro-batch, or once a step.
#[test]
fn gradient_accumulation() {
    let units = 4;
    let reduce_each = GradientAccumulation::ReduceEach;
    let hold = GradientAccumulation::HoldUnsharded;
    let each = accumulated(reduce_each, ShardingStrategy::FullShard);
    assert_eq!(each.counts.reduce_scatters, 2 * 3 * units);
    let held = accumulated(hold, ShardingStrategy::FullShard);
    assert_eq!(held.counts.reduce_scatters, 2 * units);
    let (small, large) = (each.gradients, held.gradients);
    assert!(large > small, "held gradients take memory: {large} {small}");
    let elements = |state: &FullState| -> Parameters {
        state.iter().map(|(path, data)| (path.clone(), data.iter::<f32>().collect())).collect()
    };
    let (each_elements, held_elements) = (elements(&each.state), elements(&held.state));
    let within = Within::Absolute(1e-6);
    assert_parameters_close(&held_elements, &each_elements, within, "held gradients");
    for (accumulation, full) in [(reduce_each, each), (hold, held)] {
        let none = accumulated(accumulation, ShardingStrategy::NoShard);
        assert_same_state(&full.state, &none.state, format_args!("{accumulation:?}"));
        assert_eq!(full.counts.reduce_scatters, none.counts.reduce_scatters);
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root, tie("input" = "output"))]
struct Tied {
    input: Param<Tensor<2>>,
    blocks: Vec<Block>,
    output: Param<Tensor<2>>,
}

#[fsdp_unit]
impl Tied {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = x.matmul(self.input.val());
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        x.matmul(self.output.val().transpose())
    }
}

/// The gradient of a tied weight, of a size that no world divides, is that of plain Burn.
#[test]
fn tied_and_uneven() {
    for world in [2, 3, 5] {
        let ranks = on_ranks(world, |worker| {
            let device = worker.device();
            let input_weight = LinearConfig::new(WIDTH, WIDTH).init(device).weight;
            let output = input_weight.clone();
            let blocks = vec![Block::new(device)];
            let model = Tied { input: input_weight, blocks, output };
            let model = fully_shard(model, worker, FsdpOptions::new())?;
            let state = model.state().full(Recipient::All)?;
            let param = |path: &str| Param::from_data(state[path].clone(), device);
            let linear = |path: &str| Linear {
                weight: Param::from_data(state[&format!("{path}.weight")].clone(), device),
                bias: Some(Param::from_data(state[&format!("{path}.bias")].clone(), device)),
            };
            let block = Block { up: linear("blocks.0.up"), down: linear("blocks.0.down") };
            let weight = param("input");
            let plain = Tied { output: weight.clone(), input: weight, blocks: vec![block] };
            let x = || input(0, 0, 3, device);
            let expected = GradientsParams::from_grads(loss(plain.forward(x())).backward(), &plain);
            let gradients = model.backward(loss(model.forward(x())))?;
            Ok((gradient(&gradients, &model.input), gradient(&expected, &plain.input)))
        });
        let found = full_gradient(ranks.iter().map(|(found, _)| found));
        let expected = ranks[0].1.as_ref().expect("plain Burn has a gradient");
        assert_eq!(expected.len(), WIDTH * WIDTH);
        assert!(expected.iter().any(|element| element.abs() > 1e-3), "{expected:?}");
        assert_close(&found, expected, Within::Absolute(1e-5), format_args!("{world} ranks"));
    }
}

/// A tied weight has one gradient, which counts once in the norm and is scaled once.
#[test]
fn tied_weights_are_clipped_once() {
    let run = |strategy| {
        on_ranks(2, move |worker| {
            let device = worker.device();
            let input_weight = LinearConfig::new(WIDTH, WIDTH).init(device).weight;
            let output = input_weight.clone();
            let model = Tied { input: input_weight, blocks: vec![Block::new(device)], output };
            let options = FsdpOptions::new().with_strategy(strategy).with_seed(4);
            let model = fully_shard(model, worker, options)?;
            let mut gradients = model.backward(loss(model.forward(input(0, 0, 3, device))))?;
            let of = |gradients: &GradientsParams| {
                let squares =
                    |values: Vec<f32>| values.iter().map(|x| f64::from(x * x)).sum::<f64>();
                let mut sum: f64 = [
                    gradient(gradients, &model.input),
                    gradient(gradients, &model.blocks[0].up.weight),
                    gradient(gradients, &model.blocks[0].down.weight),
                ]
                .into_iter()
                .flatten()
                .map(squares)
                .sum();
                let shards = worker.world().size() as f64;
                let biases = [&model.blocks[0].up.bias, &model.blocks[0].down.bias];
                let whole: f64 = biases
                    .into_iter()
                    .flatten()
                    .filter_map(|bias| gradient(gradients, bias))
                    .map(squares)
                    .sum();
                // Every rank holds all biases, and under `NO_SHARD` all matrices as well.
                let split = if strategy.shards() { 1.0 } else { shards };
                sum = sum / split + whole / shards;
                sum
            };
            let mut found = [of(&gradients)];
            worker.all_reduce_sum(&mut found)?;
            let norm = model.clip_grad_norm(&mut gradients, 1e-3)?;
            let mut clipped = [of(&gradients)];
            worker.all_reduce_sum(&mut clipped)?;
            Ok((norm, found[0].sqrt(), clipped[0].sqrt()))
        })
    };
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
        for (norm, expected, clipped) in run(strategy) {
            assert!((norm / expected - 1.0).abs() < 1e-5, "{norm} {expected}");
            assert!((clipped / 1e-3 - 1.0).abs() < 1e-2, "{norm} {clipped}");
        }
    }
}

#[test]
fn hybrid_mesh() {
    let run = |strategy: ShardingStrategy| {
        on_ranks(4, move |worker| {
            let options = FsdpOptions::new().with_strategy(strategy).with_shard_size(2);
            let mut model = sharded(2, worker, options)?;
            let mut optimizer = AdamWConfig::new().init();
            let mut losses = Vec::new();
            for step in 0..5 {
                let x = input(worker.rank().index(), step, 4, worker.device());
                let output = loss(model.forward(x));
                losses.push(output.clone().into_scalar::<f32>());
                let gradients = model.backward(output)?;
                model = optimizer.step(1e-2, model, gradients);
            }
            let mesh = model.stats().mesh();
            Ok((losses, mesh.replicas().size(), mesh.shard_rank().index()))
        })
    };
    let hybrid = run(ShardingStrategy::HybridShard);
    let full = run(ShardingStrategy::FullShard);
    for (rank, (losses, replicas, shard)) in hybrid.iter().enumerate() {
        assert_eq!((*replicas, *shard), (2, rank % 2));
        assert_close(losses, &full[rank].0, Within::Scaled(1e-6), format_args!("rank {rank}"));
    }
}

/// One loss through two sharded models, each with its own optimizer.
#[test]
fn several_models() {
    let run = |strategy| {
        on_ranks(2, move |worker| {
            let options = FsdpOptions::new().with_strategy(strategy);
            let mut first = sharded(2, worker, options.clone())?;
            let mut second = sharded(1, worker, options)?;
            let (mut adam, mut sgd) = (AdamWConfig::new().init(), SgdConfig::new().init());
            let mut losses = Vec::new();
            for step in 0..4 {
                let x = input(worker.rank().index(), step, 4, worker.device());
                let hidden = first.blocks[0].forward(x.clone());
                let output = loss(second.forward(hidden)) + loss(first.forward(x));
                losses.push(output.clone().into_scalar::<f32>().to_bits());
                let of_first = first.backward(output)?;
                let of_second = second.collect_gradients()?;
                assert!(!of_first.is_empty() && !of_second.is_empty());
                first = adam.step(1e-2, first, of_first);
                second = sgd.step(1e-2, second, of_second);
            }
            Ok(losses)
        })
    };
    assert_eq!(run(ShardingStrategy::FullShard), run(ShardingStrategy::NoShard));
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Branches {
    blocks: Vec<Block>,
}

#[fsdp_unit]
impl Branches {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.blocks[0].forward(x);
        let branches = self.blocks[1..].iter().map(|block| block.forward(x.clone()));
        branches.reduce(|a, b| a + b).expect("three branches")
    }
}

/// Branches are live at once in backward: gather buffers are added in the first step, and in no
/// later one.
#[test]
fn parallel_branches() {
    let run = |options: FsdpOptions| {
        of_rank_0(2, move |worker| {
            let device = worker.device();
            let model = Branches { blocks: (0..4).map(|_| Block::new(device)).collect() };
            let mut model = fully_shard(model, worker, options.clone().with_seed(2))?;
            let mut optimizer = SgdConfig::new().init();
            let (mut losses, mut added) = (Vec::new(), Vec::new());
            for step in 0..3 {
                let x = input(worker.rank().index(), step, 4, device);
                let output = loss(model.forward(x));
                losses.push(output.clone().into_scalar::<f32>().to_bits());
                let gradients = model.backward(output)?;
                model = optimizer.step(1e-2, model, gradients);
                added.push(model.stats().counts().added_gather_buffers);
            }
            Ok((losses, added))
        })
    };
    let (expected, _) = run(FsdpOptions::new().with_strategy(ShardingStrategy::NoShard));
    let (losses, added) = run(FsdpOptions::new());
    assert_eq!(losses, expected);
    assert!(added[0] > 0 && added[2] == added[0], "once: {added:?}");
    let (losses, added) = run(FsdpOptions::new().with_gather_buffers(4));
    assert_eq!(losses, expected);
    assert_eq!(added, [0, 0, 0]);
}

/// Units one after the other need no more gather buffers than the options give.
#[test]
fn a_chain_adds_no_buffer() {
    let added = on_ranks(2, |worker| {
        let model: Fsdp<Mlp> = sharded(6, worker, FsdpOptions::new())?;
        let device: &Device = worker.device();
        for step in 0..2 {
            model.backward(loss(model.forward(input(0, step, 4, device))))?;
        }
        Ok(model.stats().counts().added_gather_buffers)
    });
    assert_eq!(added, [0, 0]);
}
