//! Branches that are live at once: only the buffers that they share are added.

use burn::module::{Module, Param};
use burn::optim::SgdConfig;
use burn::tensor::activation::tanh;
use burn::tensor::{DType, Device, Tensor, TensorData};
use fsdp_runtime::prelude::*;

use super::model::{FULL, HALF, OTHER, on};

const WIDTH: usize = 10;

#[derive(Module, Debug)]
#[fsdp_unit]
struct Branch {
    weights: Vec<Param<Tensor<2>>>,
}

#[fsdp_unit]
impl Branch {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.weights.iter().fold(x, |x, weight| {
            let weight = weight.val();
            tanh(x.cast(weight.dtype()).matmul(weight).cast(FULL))
        })
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Branches {
    branches: Vec<Branch>,
}

#[fsdp_unit]
impl Branches {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.branches[0].forward(x);
        let branches = self.branches[1..].iter().map(|branch| branch.forward(x.clone()));
        branches.reduce(|a, b| a + b).expect("some branches")
    }
}

fn model(types: &[&[DType]], device: &Device) -> Branches {
    let weight = |dtype: DType, seed: usize| {
        let at = |i: usize| ((i * 37 + seed * 11) % 19) as f32 * 0.05 - 0.45;
        let data: Vec<f32> = (0..WIDTH * WIDTH).map(at).collect();
        let tensor = Tensor::<2>::from_data(TensorData::new(data, [WIDTH, WIDTH]), device);
        Param::from_tensor(tensor.cast(dtype))
    };
    let branch = |(at, types): (usize, &&[DType])| Branch {
        weights: types.iter().enumerate().map(|(i, dtype)| weight(*dtype, 3 * at + i)).collect(),
    };
    Branches { branches: types.iter().enumerate().map(branch).collect() }
}

/// The bits of the losses, how many buffers were added until the end of each step, and their bytes.
fn train(types: &'static [&[DType]], options: FsdpOptions) -> (Vec<u32>, Vec<usize>, usize) {
    on(2, move |worker| {
        let device = worker.device();
        let mut model = fully_shard(model(types, device), worker, options.clone())?;
        let before = model.slot_bytes();
        let (mut losses, mut added) = (Vec::new(), Vec::new());
        for step in 0..3 {
            let at = |i: usize| ((i * 7 + step + worker.rank().index()) % 13) as f32 * 0.1 - 0.6;
            let data: Vec<f32> = (0..4 * WIDTH).map(at).collect();
            let x = Tensor::from_data(TensorData::new(data, [4, WIDTH]), device);
            let loss = model.forward(x).powf_scalar(2.0).mean();
            losses.push(loss.clone().into_scalar::<f32>().to_bits());
            let grads = model.backward(loss)?;
            model = SgdConfig::new().init().step(0.1, model, grads);
            added.push(model.counts().added_slots);
        }
        Ok((losses, added, model.slot_bytes() - before))
    })
    .swap_remove(0)
}

/// Three branches, of which the first and the last share a ring of two in one type, and in another
/// type have a buffer each.
#[test]
fn only_the_buffers_that_two_branches_share_are_added() {
    const TYPES: &[&[DType]] = &[&[OTHER], &[FULL, HALF], &[FULL], &[FULL, HALF]];
    let (expected, ..) = train(TYPES, FsdpOptions::new().strategy(ShardingStrategy::NoShard));
    let (losses, added, bytes) = train(TYPES, FsdpOptions::new());
    assert_eq!(losses, expected);
    assert_eq!(added, [1, 1, 1], "once");
    assert_eq!(bytes, WIDTH * WIDTH * FULL.size());
    let (losses, added, _) = train(TYPES, FsdpOptions::new().slots(3));
    assert_eq!((losses, added), (expected, vec![0; 3]));
}

/// A branch that shares one buffer with one branch and another with another one gives up both.
#[test]
fn a_branch_may_share_its_buffers_with_several() {
    const TYPES: &[&[DType]] = &[&[OTHER], &[FULL], &[FULL], &[HALF], &[HALF], &[FULL, HALF]];
    let (expected, ..) = train(TYPES, FsdpOptions::new().strategy(ShardingStrategy::NoShard));
    let (losses, added, bytes) = train(TYPES, FsdpOptions::new());
    assert_eq!(losses, expected);
    assert_eq!(added, [2, 2, 2], "one of each type, once");
    assert_eq!(bytes, WIDTH * WIDTH * (FULL.size() + HALF.size()));
}
