//! The values and sizes of stored parameters.

use std::cell::RefCell;

use burn::module::{Lora, Module, ModuleMapper, Param};
use burn::optim::AdamWConfig;
use burn::tensor::{FloatDType, Tensor};
use fsdp_runtime::prelude::*;

use super::model::{BLOCKS, Net, Run, freeze};
use super::{TYPES, options};
use crate::support::compare::{assert_same_bits, assert_same_state};
use crate::support::mlp::{Sizes, loss};
use crate::support::transformer::Numbered;
use crate::support::{of_rank_0, on_ranks};

/// Rounds frozen parameters to bf16.
struct Rounded;

impl ModuleMapper for Rounded {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let trained = param.val().is_require_grad();
        let round = |tensor: Tensor<D>| {
            let rounded = tensor.detach().cast(FloatDType::BF16).cast(FloatDType::F32);
            rounded.detach()
        };
        if trained { param } else { param.map(round).set_require_grad(false) }
    }
}

#[test]
fn a_bf16_base_trains_as_weights_that_were_rounded_before() {
    for world in [1, 2, 3] {
        let outcomes = [true, false].map(|rounds_before| {
            of_rank_0(world, move |worker| {
                let net = freeze(Net::new(BLOCKS, 0.1, worker.device()).map(&mut Numbered(0)));
                let (net, options) = match rounds_before {
                    true => (net.map(&mut Rounded), FsdpOptions::new()),
                    false => (net, options(StorageType::Bf16)),
                };
                let run = Run { clip: None, ..Run::new(worker.world().size(), options) };
                Ok(run.train(net, worker)?.1)
            })
        });
        let [expected, found] = outcomes;
        assert_same_bits(&found.losses, &expected.losses, "losses");
        assert_same_state(&found.state, &expected.state, "parameters");
    }
}

const SIZES: Sizes = Sizes { blocks: 2, width: 128, hidden: 384, outputs: 128 };

/// Returns the bytes that all ranks store for a frozen model, and those that they send in a forward.
fn bytes(storage: StorageType, world: usize) -> (usize, usize) {
    let ranks = on_ranks(world, move |worker| {
        let model = SIZES.init(worker.device()).freeze();
        let model = fully_shard(model, worker, options(storage).with_seed(1))?;
        model.forward(Tensor::ones([2, SIZES.width], worker.device()));
        Ok((model.stats().sharded_bytes(), model.stats().counts().sent_bytes))
    });
    ranks.into_iter().fold((0, 0), |sum, rank| (sum.0 + rank.0, sum.1 + rank.1))
}

#[test]
fn bytes_that_are_stored_and_sent_shrink_alike() {
    for world in [1, 2, 4] {
        let (stored, sent) = bytes(StorageType::F32, world);
        assert_eq!(bytes(StorageType::Bf16, world), (stored / 2, sent / 2), "{world}");
        let matrices = SIZES.blocks * 2 * SIZES.width * SIZES.hidden + SIZES.width * SIZES.outputs;
        assert_eq!(sent, 4 * matrices);
        for (storage, words) in [
            (StorageType::INT8, 17 * 16),
            (StorageType::Nf4 { block: 64, double_quant: false }, 9 * 16),
            (StorageType::NF4, 134),
        ] {
            let (coded_stored, coded_sent) = bytes(storage, world);
            assert_eq!(coded_sent, matrices / 1024 * 4 * words, "{storage} on {world} ranks");
            assert_eq!(stored - coded_stored, sent - coded_sent, "vectors stay in f32");
        }
        let (nf4_stored, nf4_sent) = bytes(StorageType::NF4, world);
        assert!(nf4_stored as f64 <= 0.16 * stored as f64, "{nf4_stored} of {stored}");
        assert!(nf4_sent as f64 <= 0.16 * sent as f64, "{nf4_sent} of {sent}");
    }
}

/// `val()` outside of a forward, `materialize` and the full state have the values of the forward.
#[test]
fn values_outside_of_a_forward_are_those_inside() {
    for storage in TYPES {
        for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
            on_ranks(2, move |worker| {
                let net = super::mixed(worker.device());
                let options = options(storage).with_strategy(strategy);
                let net = fully_shard(net, worker, options)?;
                let state = net.state().full(Recipient::All)?;
                let elements =
                    |tensor: Tensor<2>| tensor.into_data().iter::<f32>().collect::<Vec<_>>();
                let expected: Vec<f32> = state["blocks.1.up.weight"].iter().collect();
                assert_eq!(elements(net.blocks[1].up.weight.val()), expected, "{storage}");
                let whole = net.clone().materialize();
                assert_eq!(elements(whole.blocks[1].up.weight.base()), expected, "{storage}");
                assert_eq!(net.num_params(), Net::new(BLOCKS, 0.1, worker.device()).num_params());
                Ok(())
            });
        }
    }
}

/// Trains adapters of rank 4 for a step. Returns the bytes that all ranks send in the forward, and in
/// the whole step.
fn adapter_bytes(storage: StorageType, world: usize) -> [usize; 2] {
    let ranks = on_ranks(world, move |worker| {
        let base = SIZES.init(worker.device());
        let model = base.apply_lora(Lora::new(4, 8.0));
        let model = fully_shard(model, worker, options(storage).with_seed(1))?;
        let loss = loss(model.forward(Tensor::ones([2, SIZES.width], worker.device())));
        let in_forward = model.stats().counts().sent_bytes;
        model.backward(loss)?;
        Ok([in_forward, model.stats().counts().sent_bytes])
    });
    ranks.into_iter().fold([0, 0], |sum, rank| [sum[0] + rank[0], sum[1] + rank[1]])
}

/// What is gathered of a base in 4 bits is at most 0.16 of what is gathered of one in f32.
#[test]
fn a_run_with_adapters_sends_the_share_of_the_codes() {
    let base = SIZES.blocks * 2 * SIZES.width * SIZES.hidden + SIZES.width * SIZES.outputs;
    let layers = SIZES.blocks * 2 * (SIZES.width + SIZES.hidden) + SIZES.width + SIZES.outputs;
    let factors = 4 * 4 * layers;
    for world in [1, 2, 4] {
        let [plain, step] = adapter_bytes(StorageType::F32, world);
        assert_eq!(plain, 4 * base + factors, "{world}");
        let [coded, coded_step] = adapter_bytes(StorageType::NF4, world);
        let (of_base, of_codes) = (plain - factors, coded - factors);
        assert!(of_codes as f64 <= 0.16 * of_base as f64, "{of_codes} of {of_base} on {world}");
        // In backward most units are gathered again, with their factors in f32.
        assert!(step > plain && coded_step as f64 <= 0.2 * step as f64, "{coded_step} of {step}");
    }
}

/// Trains adapters of rank 4 on a base of codes. Returns the losses, and the bytes of all shards.
fn train_adapters(strategy: ShardingStrategy, world: usize) -> (Vec<f32>, usize) {
    let ranks = on_ranks(world, move |worker| {
        let device = worker.device();
        let base = SIZES.init(device).map(&mut Numbered(0));
        // Only one rank may use Burn's generator.
        if world == 1 {
            device.seed(5);
        }
        let model = base.apply_lora(Lora::new(4, 8.0));
        let options = options(StorageType::NF4).with_strategy(strategy);
        let mut model = fully_shard(model, worker, options)?;
        let before = model.state().full(Recipient::All)?;
        let mut optimizer = AdamWConfig::new().init();
        let mut losses = Vec::new();
        for _ in 0..4 {
            let x = Tensor::ones([2, SIZES.width], device) * 0.1;
            let loss = loss(model.forward(x));
            losses.push(loss.clone().into_scalar::<f32>());
            let grads = model.backward(loss)?;
            model = optimizer.step(1e-3, model, grads);
        }
        let after = model.state().full(Recipient::All)?;
        let base = "blocks.0.up.weight";
        assert_eq!(after[base].as_bytes(), before[base].as_bytes());
        let factor = format!("{base}.lora.b");
        assert_ne!(after[&factor].as_bytes(), before[&factor].as_bytes());
        assert!(losses[3] < losses[0], "{losses:?}");
        Ok((losses, model.stats().memory().shards.now))
    });
    let bytes = ranks.iter().map(|(_, bytes)| bytes).sum();
    (ranks[0].0.clone(), bytes)
}

#[test]
fn adapters_train_on_a_base_of_codes() {
    let base = SIZES.blocks * 2 * SIZES.width * SIZES.hidden + SIZES.width * SIZES.outputs;
    let factors =
        SIZES.blocks * 2 * 4 * (SIZES.width + SIZES.hidden) + 4 * (SIZES.width + SIZES.outputs);
    let expected = base / 1024 * 4 * 134 + 4 * factors;
    let (losses, bytes) = train_adapters(ShardingStrategy::FullShard, 1);
    assert_eq!(bytes, expected);
    assert_eq!(train_adapters(ShardingStrategy::NoShard, 1).0, losses);
    assert_eq!(train_adapters(ShardingStrategy::FullShard, 2).1, expected);
}

thread_local! {
    /// Parameters that a forward on this rank's thread has kept: views of gather buffers.
    static KEPT: RefCell<Vec<Tensor<2>>> = const { RefCell::new(Vec::new()) };
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Keeps {
    frozen: Param<Tensor<2>>,
    trained: Param<Tensor<2>>,
}

#[fsdp_unit]
impl Keeps {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let (frozen, trained) = (self.frozen.val(), self.trained.val());
        assert!(!frozen.is_require_grad());
        KEPT.with_borrow_mut(|kept| kept.extend([frozen.detach(), trained.detach()]));
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

/// In debug builds the decoded parameters of a unit are filled with NaN when it is resharded.
#[test]
fn decoded_parameters_are_poisoned() {
    for storage in TYPES {
        on_ranks(2, move |worker| {
            let device = worker.device();
            let ones = || Param::from_tensor(Tensor::<2>::ones([16, 80], device));
            let unit = || Keeps { frozen: ones().set_require_grad(false), trained: ones() };
            let model = Two { first: unit(), second: unit() };
            let model = fully_shard(model, worker, options(storage))?;
            model.forward(Tensor::ones([1, 3], device));
            let kept = KEPT.take();
            assert_eq!(kept.len(), 4, "two parameters of each unit");
            for kept in kept.into_iter().take(2) {
                let elements: Vec<f32> = kept.into_data().iter().collect();
                assert_eq!(elements.len(), 16 * 80);
                assert_eq!(elements.iter().all(|it| it.is_nan()), cfg!(debug_assertions));
            }
            Ok(())
        });
    }
}
