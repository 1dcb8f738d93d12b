//! Units that compete for gather buffers: branches that are live at once, and units whose order
//! changes from step to step.

use std::cell::RefCell;

use burn::module::{Module, Param};
use burn::optim::SgdConfig;
use burn::tensor::activation::tanh;
use burn::tensor::{DType, Device, Tensor, TensorData};
use fsdp_runtime::prelude::*;

use super::model::{FULL, HALF, OTHER, on_ranks};
use super::padded;
use crate::support::of_rank_0;

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

/// The units that run, one after the other or side by side.
#[derive(Clone, Debug)]
enum Order {
    Chain(Vec<usize>),
    /// The first unit, and each of the others on its output.
    Beside,
}

#[fsdp_unit]
impl Branches {
    fn forward(&self, x: Tensor<2>, order: Order) -> Tensor<2> {
        match order {
            Order::Chain(order) => {
                order.into_iter().fold(x, |x, index| x.clone() + self.branches[index].forward(x))
            }
            Order::Beside => {
                let x = self.branches[0].forward(x);
                let branches = self.branches[1..].iter().map(|branch| branch.forward(x.clone()));
                branches.reduce(|a, b| a + b).expect("some branches")
            }
        }
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

/// The losses of a run of a few steps, and its gather buffers.
struct Buffers {
    /// Bits of the loss of each step.
    losses: Vec<u32>,
    /// Number of buffers that were added until the end of each step.
    added: Vec<usize>,
    added_bytes: usize,
    mis_prefetches: usize,
}

fn train(types: &'static [&[DType]], orders: Vec<Order>, options: FsdpOptions) -> Buffers {
    of_rank_0(2, move |worker| {
        let device = worker.device();
        let mut model = fully_shard(model(types, device), worker, options.clone())?;
        let before = model.stats().gather_buffer_bytes();
        let (mut losses, mut added) = (Vec::new(), Vec::new());
        for (step, order) in orders.iter().enumerate() {
            let at = |i: usize| ((i * 7 + step + worker.rank().index()) % 13) as f32 * 0.1 - 0.6;
            let data: Vec<f32> = (0..4 * WIDTH).map(at).collect();
            let x = Tensor::from_data(TensorData::new(data, [4, WIDTH]), device);
            let loss = model.forward(x, order.clone()).powf_scalar(2.0).mean();
            losses.push(loss.clone().into_scalar::<f32>().to_bits());
            let grads = model.backward(loss)?;
            model = SgdConfig::new().init().step(0.1, model, grads);
            added.push(model.stats().counts().added_gather_buffers);
        }
        let (added_bytes, mis_prefetches) =
            (model.stats().gather_buffer_bytes() - before, model.stats().counts().mis_prefetches);
        Ok(Buffers { losses, added, added_bytes, mis_prefetches })
    })
}

fn side_by_side(types: &'static [&[DType]], options: FsdpOptions) -> Buffers {
    train(types, vec![Order::Beside; 3], options)
}

fn no_shard() -> FsdpOptions {
    FsdpOptions::new().with_strategy(ShardingStrategy::NoShard)
}

/// Three branches. The first and the last share the buffer of one dtype, and each has its own of
/// another dtype.
#[test]
fn only_the_buffers_that_two_branches_share_are_added() {
    const TYPES: &[&[DType]] = &[&[OTHER], &[HALF, FULL], &[FULL], &[FULL, HALF]];
    let expected = side_by_side(TYPES, no_shard()).losses;
    let buffers = side_by_side(TYPES, FsdpOptions::new());
    assert_eq!(buffers.losses, expected);
    assert_eq!(buffers.added, [1, 1, 1], "once");
    assert_eq!(buffers.added_bytes, padded(2, &[WIDTH * WIDTH]) * FULL.size());
    let buffers = side_by_side(TYPES, FsdpOptions::new().with_gather_buffers(3));
    assert_eq!((buffers.losses, buffers.added), (expected, vec![0; 3]));
}

/// A branch that shares its two buffers with two different branches has to leave both.
#[test]
fn a_branch_may_share_its_buffers_with_several() {
    const TYPES: &[&[DType]] = &[&[OTHER], &[FULL], &[FULL], &[HALF], &[HALF], &[FULL, HALF]];
    let buffers = side_by_side(TYPES, FsdpOptions::new());
    assert_eq!(buffers.losses, side_by_side(TYPES, no_shard()).losses);
    assert_eq!(buffers.added, [2, 2, 2], "one of each dtype, once");
    assert_eq!(buffers.added_bytes, padded(2, &[WIDTH * WIDTH]) * (FULL.size() + HALF.size()));
}

/// Each step runs some of the units in an order of its own. Prefetches turn out wrong, and a unit
/// may want the buffers of several others, of which those in use must not be taken.
#[test]
fn a_changing_order_takes_no_buffer_that_is_in_use() {
    const TYPES: &[&[DType]] =
        &[&[FULL, HALF], &[FULL], &[HALF], &[HALF, FULL], &[OTHER, FULL], &[FULL, HALF, OTHER]];
    let mut state = 1_u64;
    let mut draw = |below: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut order = |_| {
        let mut left: Vec<usize> = (0..TYPES.len()).collect();
        let len = 3 + draw(TYPES.len() - 2);
        Order::Chain((0..len).map(|_| left.swap_remove(draw(left.len()))).collect())
    };
    let orders: Vec<Order> = (0..24).map(&mut order).collect();
    let expected = train(TYPES, orders.clone(), no_shard()).losses;
    for gather_buffers in [1, 2, 3] {
        let buffers =
            train(TYPES, orders.clone(), FsdpOptions::new().with_gather_buffers(gather_buffers));
        assert_eq!(buffers.losses, expected, "{gather_buffers} buffers");
        assert!(gather_buffers == 1 || buffers.mis_prefetches > 0);
        assert_eq!(buffers.added.last(), Some(&0));
    }
}

thread_local! {
    /// Parameters that a forward on this rank's thread has kept: views of gather buffers.
    static KEPT: RefCell<Vec<Tensor<2>>> = const { RefCell::new(Vec::new()) };
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Keeps {
    weights: Vec<Param<Tensor<2>>>,
}

#[fsdp_unit]
impl Keeps {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let weights = self.weights.iter().map(Param::val);
        KEPT.with_borrow_mut(|kept| kept.extend(weights));
        x
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Two {
    first: Keeps,
    second: Keeps,
}

#[fsdp_unit]
impl Two {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward(self.first.forward(x))
    }
}

/// In debug builds every buffer of a unit is filled with NaN when the unit is resharded.
#[test]
fn all_buffers_of_a_unit_are_poisoned() {
    on_ranks(2, |worker| {
        let device = worker.device();
        let Branches { branches } = model(&[&[FULL, HALF], &[FULL, HALF]], device);
        let mut units = branches.into_iter().map(|branch| Keeps { weights: branch.weights });
        let [first, second] = [units.next(), units.next()].map(|unit| unit.expect("two units"));
        let model = fully_shard(Two { first, second }, worker, FsdpOptions::new())?;
        model.forward(Tensor::ones([1, WIDTH], device));
        // The second unit stays gathered, as its backward is next.
        let kept = KEPT.take();
        assert_eq!(kept.len(), 4, "two parameters of each unit");
        for kept in kept.into_iter().take(2) {
            let elements: Vec<f32> = kept.into_data().iter().collect();
            assert_eq!(elements.len(), WIDTH * WIDTH);
            assert_eq!(elements.iter().all(|it| it.is_nan()), cfg!(debug_assertions));
        }
        Ok(())
    });
}
