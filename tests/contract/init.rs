//! `test_fully_shard_init`: which parameters are managed, how they are sharded, and their names.

use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use fsdp_runtime::prelude::*;

use super::mlp::{HIDDEN, Mlp, WIDTH, input, on_ranks, sharded};

/// Every parameter is in one unit, under its path in the model.
#[test]
fn managed_parameters_and_names() {
    let state = on_ranks(2, |worker| {
        let model = sharded(2, worker, FsdpOptions::new())?;
        assert_eq!(model.num_params(), Mlp::new(2, worker.device()).num_params());
        model.state().full(Recipient::All)
    });
    let names: Vec<&str> = state[0].keys().map(String::as_str).collect();
    let expected = [
        "blocks.0.down.bias",
        "blocks.0.down.weight",
        "blocks.0.up.bias",
        "blocks.0.up.weight",
        "blocks.1.down.bias",
        "blocks.1.down.weight",
        "blocks.1.up.bias",
        "blocks.1.up.weight",
        "head.bias",
        "head.weight",
    ];
    assert_eq!(names, expected, "names have no prefix of a wrapper");
}

#[derive(Module, Debug)]
#[fsdp_unit(root, tie("first" = "second"))]
struct Shared {
    first: Param<Tensor<2>>,
    second: Param<Tensor<2>>,
}

#[fsdp_unit]
impl Shared {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.matmul(self.first.val()).matmul(self.second.val())
    }
}

#[test]
fn shared_parameters_are_managed_once() {
    let ranks = on_ranks(2, |worker| {
        let first = LinearConfig::new(WIDTH, WIDTH).init(worker.device()).weight;
        let model = Shared { second: first.clone(), first };
        let model = fully_shard(model, worker, FsdpOptions::new())?;
        Ok((model.num_params(), model.stats().sharded_bytes()))
    });
    assert_eq!(ranks, [(WIDTH * WIDTH, WIDTH * WIDTH * 2); 2]);
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Uneven {
    eight: Param<Tensor<2>>,
    three: Param<Tensor<2>>,
    one: Param<Tensor<2>>,
}

#[fsdp_unit]
impl Uneven {
    fn forward(&self) -> Tensor<1> {
        self.eight.val().sum() + self.three.val().sum() * 2.0 + self.one.val().sum() * 3.0
    }
}

/// Matrices of fewer elements than there are ranks: some ranks hold nothing of them.
#[test]
fn uneven_sizes_8_3_1() {
    for world in 1..=6 {
        let ranks = on_ranks(world, |worker| {
            let device: &Device = worker.device();
            let row = |n: usize| Param::from_tensor(Tensor::<2>::ones([1, n], device));
            let model = Uneven { eight: row(8), three: row(3), one: row(1) };
            let model = fully_shard(model, worker, FsdpOptions::new())?;
            let output = model.forward();
            let value = output.clone().into_scalar::<f32>();
            let gradients = model.backward(output)?;
            let sum = |param: &Param<Tensor<2>>| {
                let gradient = gradients.get::<2>(param.id);
                gradient.map_or(0.0, |gradient| gradient.sum().into_scalar::<f32>())
            };
            Ok((value, sum(&model.eight), sum(&model.three), sum(&model.one)))
        });
        assert!(ranks.iter().all(|rank| rank.0 == 8.0 + 6.0 + 3.0));
        let sums = ranks.iter().fold((0.0, 0.0, 0.0), |s, r| (s.0 + r.1, s.1 + r.2, s.2 + r.3));
        assert_eq!(sums, (8.0, 6.0, 3.0), "world {world}");
    }
}

/// Ranks with other values of their own have rank 0's afterwards.
#[test]
fn rank_0_broadcast() {
    let ranks = on_ranks(3, |worker| {
        let rank = worker.rank().index();
        let values = Tensor::full([WIDTH, HIDDEN], rank as f64 + 1.0, worker.device());
        let mut model = Mlp::new(1, worker.device());
        model.blocks[0].up.weight = Param::from_tensor(values);
        let model = fully_shard(model, worker, FsdpOptions::new())?;
        let state = model.state().full(Recipient::All)?;
        Ok(state["blocks.0.up.weight"].iter::<f32>().collect::<Vec<_>>())
    });
    assert!(ranks.iter().all(|found| *found == [1.0; WIDTH * HIDDEN]));
}

#[test]
fn wrapping_is_printed_as_a_tree() {
    let text = on_ranks(2, |worker| {
        let model = sharded(2, worker, FsdpOptions::new())?;
        model.forward(input(0, 0, 1, worker.device()));
        Ok(model.stats().wrapping().to_string())
    });
    let lines: Vec<&str> = text[0].lines().collect();
    assert_eq!(lines[0], "(root): Mlp (51 params, 108 bytes sharded, 192 unsharded)");
    assert!(lines[1].starts_with("  blocks.0: Block (1336 params, "), "{}", lines[1]);
    assert_eq!(lines.len(), 3);
}

#[test]
fn a_sharded_model_is_printed_with_its_units() {
    let text = on_ranks(2, |worker| Ok(sharded(1, worker, FsdpOptions::new())?.to_string()));
    let expected = "\
Mlp: unit, 51 parameters, 108 B on this rank, 192 B gathered
  blocks: Vec
    0: Block: unit, 1336 parameters, 2.7 KiB on this rank, 5.0 KiB gathered
      up: Linear
        weight: [16, 40], sharded
        bias: [40], replicated
      down: Linear
        weight: [40, 16], sharded
        bias: [16], replicated
  head: Linear
    weight: [16, 3], sharded
    bias: [3], replicated";
    assert_eq!(text, [expected; 2]);
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Normed {
    linear: Linear,
    norm: BatchNorm,
}

#[fsdp_unit]
impl Normed {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.norm.forward(self.linear.forward(x))
    }
}

/// `sync_module_states` broadcasts buffers too, as PyTorch's option does.
#[test]
fn running_statistics_are_broadcast_with_the_states() {
    for sync in [true, false] {
        let ranks = on_ranks(2, move |worker| {
            let device = worker.device();
            let linear = LinearConfig::new(WIDTH, WIDTH).init(device);
            let model = Normed { linear, norm: BatchNormConfig::new(WIDTH).init(device) };
            // Each rank has updated its statistics on inputs of its own.
            model.forward(input(worker.rank().index(), 0, 4, device));
            let mean = |norm: &BatchNorm| -> Vec<f32> {
                norm.running_mean.value_sync().into_data().iter::<f32>().collect()
            };
            let before = mean(&model.norm);
            // Without it all ranks must have the same weights, so that these are ignored.
            let options = FsdpOptions::new().with_sync_module_states(sync);
            let ids = [model.linear.weight.id, model.linear.bias.as_ref().expect("a bias").id];
            let options = if sync { options } else { options.with_ignored_params(ids) };
            let model = fully_shard(model, worker, options)?;
            Ok((before, mean(&model.norm)))
        });
        let [(first, shared_first), (second, shared_second)] = &ranks[..] else { panic!("two") };
        assert_ne!(first, second);
        assert_eq!(first, shared_first);
        assert_eq!(shared_second, if sync { first } else { second });
    }
}
