//! Frozen codes, and trained parameters in bf16 and f32, in one unit: under every strategy, and with
//! everything that moves, recomputes or saves parameters.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, LambConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor, TensorData};
use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::{Checkpoint, Restore};
use fsdp_runtime::nn::{Dropout, DropoutConfig};
use fsdp_runtime::optim::WholeParam;
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use crate::support::compare::{assert_same_bits, assert_same_state};
use crate::support::of_rank_0;
use crate::support::transformer::Numbered;

const WIDTH: usize = 40;
const STEPS: usize = 4;

#[derive(Module, Debug)]
#[fsdp_unit]
struct Mixed {
    base: Linear,
    half: Linear,
    full: Linear,
    dropout: Dropout,
}

#[fsdp_unit]
impl Mixed {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let hidden = relu(self.half.forward(self.base.forward(x.clone())));
        x + self.dropout.forward(self.full.forward(hidden))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Stack {
    units: Vec<Mixed>,
    head: Linear,
}

#[fsdp_unit]
impl Stack {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.head.forward(self.units.iter().fold(x, |x, unit| unit.forward(x)))
    }
}

fn stack(start: u64, device: &Device) -> Stack {
    let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
    let unit = |_| Mixed {
        base: linear(),
        half: linear(),
        full: linear(),
        dropout: DropoutConfig::new(0.1).init(),
    };
    let mut net = Stack { units: (0..3).map(unit).collect(), head: linear() };
    net = net.map(&mut Numbered(start));
    for unit in &mut net.units {
        unit.base = unit.base.clone().freeze();
    }
    net
}

/// What a run does beside plain steps.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Plain,
    OffloadParams,
    OffloadOptimizer,
    Recompute,
    Whole,
    Checkpoint,
}

fn options(strategy: ShardingStrategy, way: Way) -> FsdpOptions {
    let storage = StoragePolicy::new().with_frozen(StorageType::NF4);
    let half = storage.with_trained(StorageType::Bf16);
    let full = (0..3).map(|unit| format!("units.{unit}.full"));
    let options = FsdpOptions::new()
        .with_seed(3)
        .with_strategy(strategy)
        .with_storage(half)
        .with_storage_at(full, storage);
    let options = if strategy.is_hybrid() { options.with_shard_size(2) } else { options };
    match way {
        Way::OffloadParams => options.with_offload(OffloadPolicy::Params { pin_memory: false }),
        Way::OffloadOptimizer => options.with_offload(OffloadPolicy::OptimizerOnly),
        Way::Recompute => options.with_activation_checkpointing(ActivationCheckpointing::All),
        Way::Plain | Way::Whole | Way::Checkpoint => options,
    }
}

fn input(step: usize, worker: &Worker) -> Tensor<2> {
    let element = |i: usize| ((i + step * 31 + worker.rank().index() * 97) as f32 * 0.37).sin();
    let elements: Vec<f32> = (0..2 * WIDTH).map(element).collect();
    Tensor::from_data(TensorData::new(elements, [2, WIDTH]), worker.device())
}

/// Trains on four ranks. Returns the losses of rank 0, and all parameters before and after.
fn train(strategy: ShardingStrategy, way: Way) -> (Vec<f64>, FullState, FullState) {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("checkpoint");
    of_rank_0(4, move |worker| {
        let shard = |start| -> Result<_, Error> {
            fully_shard(stack(start, worker.device()), worker, options(strategy, way))
        };
        let mut net = shard(0)?;
        let before = net.state().full(Recipient::All)?;
        let mut optimizer = AdamWConfig::new().init();
        let mut whole = WholeParam::new(LambConfig::new().init());
        let mut losses = Vec::new();
        for step in 0..STEPS {
            if way == Way::Checkpoint && step == 2 {
                Checkpoint::new(2)
                    .with_model("net", &net)
                    .with_optimizer("adamw", &optimizer)
                    .save(worker, &folder)?;
                (net, optimizer) = (shard(100)?, AdamWConfig::new().init());
                Restore::new()
                    .with_model("net", &mut net)
                    .with_optimizer("adamw", &mut optimizer)
                    .load(worker, &folder)?;
            }
            let loss = net.forward(input(step, worker)).powf_scalar(2.0).mean();
            losses.push(f64::from(loss.clone().into_scalar::<f32>()));
            let grads = net.backward(loss)?;
            net = match way {
                Way::Whole => whole.step(1e-2, net, grads)?,
                _ => optimizer.step(1e-2, net, grads),
            };
        }
        let text = net.to_string();
        for line in ["sharded, nf4", "replicated, nf4", "sharded, bf16", "replicated, bf16"] {
            let sharded = strategy != ShardingStrategy::NoShard;
            let has_matrices = line.starts_with("sharded") == sharded;
            assert!(text.contains(line) || !has_matrices, "{line}: {text}");
        }
        Ok((losses, before, net.state().full(Recipient::All)?))
    })
}

#[test]
fn every_strategy_trains_mixed_units_in_every_way() {
    use ShardingStrategy::{FullShard, HybridShard, HybridShardZero2, NoShard, ShardGradOp};
    let ways = [
        Way::Plain,
        Way::OffloadParams,
        Way::OffloadOptimizer,
        Way::Recompute,
        Way::Checkpoint,
        Way::Whole,
    ];
    // Hybrid strategies sum gradients in another order.
    for strategies in [&[FullShard, ShardGradOp, NoShard][..], &[HybridShard, HybridShardZero2]] {
        let plain = train(strategies[0], Way::Plain);
        let whole = train(strategies[0], Way::Whole);
        for path in plain.1.keys() {
            let (before, after) = (&plain.1[path], &plain.2[path]);
            let is_frozen = path.contains(".base.");
            assert_eq!(before.as_bytes() == after.as_bytes(), is_frozen, "{path}");
        }
        assert_ne!(plain.0, whole.0, "the optimizers differ");
        for strategy in strategies {
            for way in ways {
                let expected = if way == Way::Whole { &whole } else { &plain };
                let found = train(*strategy, way);
                let what = format!("{strategy} {way:?}");
                assert_same_bits(&found.0, &expected.0, &what);
                assert_same_state(&found.2, &expected.2, &what);
            }
        }
    }
}
