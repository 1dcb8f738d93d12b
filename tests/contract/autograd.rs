//! `test_fully_shard_autograd`: outputs of every form, each of which may be left out of the loss.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use fsdp_runtime::prelude::*;

use super::mlp::{Block, WIDTH, input, loss, of_rank_0, on_ranks};

#[derive(UnitValue)]
struct Both {
    one: Tensor<2>,
    two: Vec<Tensor<2>>,
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Fork {
    left: Linear,
    right: Linear,
}

#[fsdp_unit]
impl Fork {
    fn forward(&self, x: Tensor<2>) -> Both {
        let right = self.right.forward(x.clone());
        Both { one: self.left.forward(x), two: vec![right.clone(), right * 2.0] }
    }
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Split {
    left: Linear,
    right: Linear,
}

#[fsdp_unit]
impl Split {
    fn forward(&self, x: Tensor<2>) -> (Tensor<2>, Tensor<2>) {
        (self.left.forward(x.clone()), self.right.forward(x))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Model {
    block: Block,
    fork: Fork,
    split: Split,
    last: Block,
}

#[derive(Clone, Copy, Debug)]
enum Used {
    All,
    One,
    SecondOfTuple,
    Neither,
}

#[fsdp_unit]
impl Model {
    fn forward(&self, x: Tensor<2>, used: Used) -> Tensor<2> {
        let x = self.block.forward(x);
        let both = self.fork.forward(x.clone());
        let (left, right) = self.split.forward(both.one.clone());
        let x = match used {
            Used::All => both.two.into_iter().fold(left + right, |sum, x| sum + x),
            Used::One => left,
            Used::SecondOfTuple => right,
            Used::Neither => x,
        };
        self.last.forward(x)
    }
}

fn model(device: &Device) -> Model {
    let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
    Model {
        block: Block::new(device),
        fork: Fork { left: linear(), right: linear() },
        split: Split { left: linear(), right: linear() },
        last: Block::new(device),
    }
}

fn norms(strategy: ShardingStrategy, used: Used) -> Vec<u64> {
    of_rank_0(2, move |worker| {
        let options = FsdpOptions::new().with_strategy(strategy).with_seed(6);
        let model = fully_shard(model(worker.device()), worker, options)?;
        let mut norms = Vec::new();
        // The steps after it must not notice that outputs were left out.
        for (step, used) in [used, Used::All, used].into_iter().enumerate() {
            let x = input(worker.rank().index(), step, 32, worker.device());
            let mut gradients = model.backward(loss(model.forward(x, used)))?;
            norms.push(model.clip_grad_norm(&mut gradients, 1e9)?.to_bits());
        }
        Ok(norms)
    })
}

fn assert_norms_are_those_of_no_shard(used: Used) {
    let expected = norms(ShardingStrategy::NoShard, used);
    assert!(expected.iter().all(|&norm| f64::from_bits(norm) > 0.0), "{used:?}: {expected:?}");
    assert_eq!(norms(ShardingStrategy::FullShard, used), expected);
    assert_eq!(norms(ShardingStrategy::ShardGradOp, used), expected);
}

#[test]
fn struct_and_tuple_outputs() {
    assert_norms_are_those_of_no_shard(Used::All);
}

#[test]
fn unused_forward_output() {
    assert_norms_are_those_of_no_shard(Used::One);
    assert_norms_are_those_of_no_shard(Used::SecondOfTuple);
}

#[test]
fn unused_forward_module() {
    assert_norms_are_those_of_no_shard(Used::Neither);
}

/// The next backward releases what forwards without a backward have left, and finds the same
/// gradients.
#[test]
fn a_forward_without_backward_leaves_nothing_behind() {
    let after = |forwards: usize| {
        on_ranks(2, move |worker| {
            let options = FsdpOptions::new().with_seed(6);
            let model = fully_shard(model(worker.device()), worker, options)?;
            let x = || input(worker.rank().index(), 0, 4, worker.device());
            for _ in 0..forwards {
                drop(model.forward(x(), Used::All));
            }
            let mut gradients = model.backward(loss(model.forward(x(), Used::All)))?;
            let norm = model.clip_grad_norm(&mut gradients, 1e9)?;
            Ok((
                norm.to_bits(),
                model.stats().memory().gathered.now,
                model.stats().counts().added_gather_buffers,
            ))
        })
    };
    let fresh = after(0);
    assert!(f64::from_bits(fresh[0].0) > 0.0 && fresh[0].1 > 0, "{fresh:?}");
    assert_eq!(fresh[0].2, 0, "gather buffers that were added");
    assert_eq!(after(3), fresh);
}
