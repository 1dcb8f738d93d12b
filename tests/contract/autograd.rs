//! `test_fully_shard_autograd`: outputs of every form, used or not.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use fsdp_runtime::prelude::*;

use super::mlp::{Block, WIDTH, input, loss, on};

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
    on(2, move |worker| {
        let options = FsdpOptions::new().with_strategy(strategy).with_seed(6);
        let model = fully_shard(model(worker.device()), worker, options)?;
        let mut norms = Vec::new();
        // The step after must find everything as it should be.
        for (step, used) in [used, Used::All, used].into_iter().enumerate() {
            let x = input(worker.rank().index(), step, 32, worker.device());
            let mut gradients = model.backward(loss(model.forward(x, used)))?;
            norms.push(model.clip_grad_norm(&mut gradients, 1e9)?.to_bits());
        }
        Ok(norms)
    })
    .swap_remove(0)
}

fn same(used: Used) {
    let expected = norms(ShardingStrategy::NoShard, used);
    assert_eq!(norms(ShardingStrategy::FullShard, used), expected);
    assert_eq!(norms(ShardingStrategy::ShardGradOp, used), expected);
}

#[test]
fn struct_and_tuple_outputs() {
    same(Used::All);
}

#[test]
fn unused_forward_output() {
    same(Used::One);
    same(Used::SecondOfTuple);
}

#[test]
fn unused_forward_module() {
    same(Used::Neither);
}

/// No backward follows: what forward left is given back at the next one.
#[test]
fn a_forward_without_backward_leaves_nothing_behind() {
    let ranks = on(2, |worker| {
        let options = FsdpOptions::new().with_seed(6);
        let model = fully_shard(model(worker.device()), worker, options)?;
        let x = || input(worker.rank().index(), 0, 4, worker.device());
        for _ in 0..3 {
            drop(model.forward(x(), Used::All));
        }
        let mut gradients = model.backward(loss(model.forward(x(), Used::All)))?;
        let norm = model.clip_grad_norm(&mut gradients, 1e9)?;
        Ok((norm, model.stats().memory().gathered.now, model.stats().counts().added_slots))
    });
    let fresh = norms(ShardingStrategy::FullShard, Used::All);
    assert!(f64::from_bits(fresh[0]) > 0.0 && ranks[0].0 > 0.0);
    assert_eq!(ranks[0].2, 0);
}
