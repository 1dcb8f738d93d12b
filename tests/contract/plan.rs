//! A plan has the collectives, the bytes and the memory of a real step, in the order of a real step.

use burn::module::{Lora, Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use fsdp_runtime::model::{Counts, HookedForward};
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::plan::{Batch, Cluster, StepPlan};
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Mesh, Rank, WorldSize};

use super::mlp::{Block, WIDTH, loss, on_ranks};
use super::support::trace::{only, record};

const WORLDS: [usize; 5] = [1, 2, 3, 4, 8];

/// A model whose root unit has a tied weight at both ends, and units of two nesting levels.
#[derive(Module, Debug)]
#[fsdp_unit(root, tie("tokens" = "output"))]
struct Model {
    tokens: Embedding,
    output: Param<Tensor<2>>,
    layers: Vec<Layer>,
    norm: LayerNorm,
}

#[fsdp_unit]
impl Model {
    fn forward(&self, ids: Tensor<2, Int>) -> Tensor<2> {
        let [rows, length] = ids.dims();
        let x = self.tokens.forward(ids).reshape([rows * length, WIDTH]);
        let x = self.layers.iter().fold(x, |x, layer| layer.forward(x));
        self.norm.forward(x).matmul(self.output.val().transpose())
    }
}

/// A unit with two units inside it.
#[derive(Module, Debug)]
#[fsdp_unit]
struct Layer {
    blocks: Vec<Block>,
    last: Linear,
}

#[fsdp_unit]
impl Layer {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.last.forward(self.blocks.iter().fold(x, |x, block| block.forward(x)))
    }
}

/// A model of one nesting level below the root.
#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Flat {
    tokens: Embedding,
    blocks: Vec<Block>,
}

#[fsdp_unit]
impl Flat {
    fn forward(&self, ids: Tensor<2, Int>) -> Tensor<2> {
        let [rows, length] = ids.dims();
        let x = self.tokens.forward(ids).reshape([rows * length, WIDTH]);
        self.blocks.iter().fold(x, |x, block| block.forward(x))
    }
}

/// A model that is trained on rows of numbers.
trait Trained: HookedForward + Clone + Sync {
    fn new(device: &Device) -> Self;
    fn run(&self, ids: Tensor<2, Int>) -> Tensor<2>;
}

impl Trained for Model {
    fn new(device: &Device) -> Self {
        let tokens = EmbeddingConfig::new(37, WIDTH).init(device);
        let layer = |_| Layer {
            blocks: (0..2).map(|_| Block::new(device)).collect(),
            last: LinearConfig::new(WIDTH, WIDTH).init(device),
        };
        Self {
            output: tokens.weight.clone(),
            tokens,
            layers: (0..3).map(layer).collect(),
            norm: LayerNormConfig::new(WIDTH).init(device),
        }
    }

    fn run(&self, ids: Tensor<2, Int>) -> Tensor<2> {
        self.forward(ids)
    }
}

impl Trained for Flat {
    fn new(device: &Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(37, WIDTH).init(device),
            blocks: (0..4).map(|_| Block::new(device)).collect(),
        }
    }

    fn run(&self, ids: Tensor<2, Int>) -> Tensor<2> {
        self.forward(ids)
    }
}

/// Returns the counts of the steps from `before` to `after`.
fn counted(before: &Counts, after: &Counts) -> [usize; 9] {
    let read = |counts: &Counts| {
        [
            counts.all_gathers,
            counts.single_gathers,
            counts.sent_bytes,
            counts.sent_gradient_bytes,
            counts.reduce_scatters,
            counts.all_reduces,
            counts.mis_prefetches,
            counts.added_gather_buffers,
            counts.drains,
        ]
    };
    let (before, after) = (read(before), read(after));
    std::array::from_fn(|at| after[at] - before[at])
}

/// Compares the counts and the memory of two steps, of `batches` micro-batches each, with the plan.
fn assert_as_planned<M: Trained + 'static>(world: usize, options: FsdpOptions, batches: usize) {
    assert_model_as_planned(M::new, world, options, batches);
}

/// Compares the counts and the memory of two steps of the model that `new` makes with its plan.
fn assert_model_as_planned<M: Trained + 'static>(
    new: fn(&Device) -> M,
    world: usize,
    options: FsdpOptions,
    batches: usize,
) {
    let options = options.with_optimizer_check(false).with_seed(3);
    let what = format!("{world} ranks, {batches} batches, {options:?}");
    on_ranks(world, move |worker| {
        let device = worker.device();
        let mesh = Mesh::new(worker.rank(), worker.world());
        let model = new(device);
        let plan = StepPlan::new(&model, mesh, &options)?;
        let planned = counted(&Counts::default(), &plan.counts(batches));
        let mut model = fully_shard(model, worker, options.clone())?;
        let mut adam = AdamWConfig::new().init();
        for step in 0..2 {
            let before = model.stats().counts();
            let ids = || Tensor::from_data([[1, 5, 36], [7, 0, 2]], device);
            for _ in 1..batches {
                model.accumulate(loss(model.run(ids())))?;
            }
            let gradients = model.backward(loss(model.run(ids())))?;
            let found = counted(&before, &model.stats().counts());
            assert_eq!(found, planned, "step {step}, {what}");
            model = adam.step(1e-3, model, gradients);
        }
        let (memory, forecast) = (model.stats().memory(), plan.memory(batches));
        let found = [memory.shards, memory.replicated, memory.gathered];
        let expected = [forecast.shards, forecast.replicated, forecast.gathered];
        assert_eq!(found.map(|usage| usage.peak), expected, "{what}");
        let host = model.stats().host_memory();
        let found = [host.shards, host.replicated, host.gradients];
        let expected = [forecast.host.shards, forecast.host.replicated, forecast.host.gradients];
        assert_eq!(found.map(|usage| usage.peak), expected, "{what}");
        Ok(())
    });
}

#[test]
fn strategies_and_worlds() {
    for (strategy, _) in ShardingStrategy::ALL {
        for world in WORLDS {
            let shard_size = if world % 2 == 0 { world / 2 } else { world };
            let options = FsdpOptions::new().with_strategy(strategy).with_shard_size(shard_size);
            assert_as_planned::<Flat>(world, options.clone(), 1);
            assert_as_planned::<Model>(world, options, 1);
        }
    }
}

/// Returns a model whose embedding and first block are frozen, and the matrices of the second block. The
/// third one has adapters, and the others are trained.
fn partly_frozen(device: &Device) -> Flat {
    let Flat { tokens, blocks } = Flat::new(device);
    let blocks = blocks.into_iter().enumerate().map(|(at, block)| match at {
        0 => block.freeze(),
        1 => {
            let up = Linear { weight: block.up.weight.set_require_grad(false), ..block.up };
            let down = Linear { weight: block.down.weight.set_require_grad(false), ..block.down };
            Block { up, down }
        }
        2 => block.apply_lora(Lora::new(2, 4.0)),
        _ => block,
    });
    Flat { tokens: tokens.freeze(), blocks: blocks.collect() }
}

#[test]
fn frozen_parameters_and_adapters() {
    let options = FsdpOptions::new();
    let recomputed = options.clone().with_activation_checkpointing(ActivationCheckpointing::All);
    let codes = StoragePolicy::new().with_frozen(StorageType::NF4);
    for options in [
        options.clone(),
        options.clone().with_strategy(ShardingStrategy::ShardGradOp),
        options.clone().with_strategy(ShardingStrategy::NoShard),
        options.clone().with_offload(OffloadPolicy::Params { pin_memory: false }),
        options.clone().with_backward_prefetch(BackwardPrefetch::Post),
        options.clone().with_storage(codes),
        options.with_quantized_reductions(Some(64)),
        recomputed,
    ] {
        for world in [1, 2, 4] {
            for batches in [1, 2] {
                assert_model_as_planned(partly_frozen, world, options.clone(), batches);
            }
        }
    }
}

#[test]
fn recomputation_and_offload() {
    let params = OffloadPolicy::Params { pin_memory: false };
    for offload in [OffloadPolicy::None, params, OffloadPolicy::OptimizerOnly] {
        for which in [ActivationCheckpointing::None, ActivationCheckpointing::All] {
            let options =
                FsdpOptions::new().with_offload(offload).with_activation_checkpointing(which);
            for world in WORLDS {
                assert_as_planned::<Flat>(world, options.clone(), 1);
            }
            assert_as_planned::<Model>(2, options.clone(), 1);
            assert_as_planned::<Flat>(2, options.with_persist_below(usize::MAX), 2);
        }
    }
}

#[test]
fn accumulation() {
    use GradientAccumulation::{HoldUnsharded, ReduceEach, ReduceInGroup};
    for accumulation in [ReduceEach, ReduceInGroup, HoldUnsharded] {
        for strategy in [ShardingStrategy::FullShard, ShardingStrategy::HybridShard] {
            let options = FsdpOptions::new().with_strategy(strategy).with_shard_size(2);
            let options = options.with_gradient_accumulation(accumulation);
            assert_as_planned::<Flat>(4, options.clone(), 3);
            assert_as_planned::<Flat>(4, options.with_reshard_after_backward(false), 3);
        }
    }
}

/// Of four blocks, the third one prefetches the first one in forward, whose gather buffer the fourth one
/// takes before backward.
#[test]
fn lists_of_units_to_prefetch() {
    let options = FsdpOptions::new().with_forward_prefetch_at("blocks.2", ["blocks.0"]);
    for options in [
        options.clone(),
        options.clone().with_backward_prefetch_at("blocks.3", ["blocks.1", "blocks.2"]),
        options.with_activation_checkpointing(ActivationCheckpointing::All),
    ] {
        let model = Flat::new(&Device::flex().autodiff());
        let world = WorldSize::new(4).expect("four ranks");
        let plan = StepPlan::new(&model, Mesh::new(Rank::ZERO, world), &options).expect("a plan");
        assert!(plan.counts(1).mis_prefetches > 0, "{options:?}");
        for batches in [1, 2] {
            assert_as_planned::<Flat>(4, options.clone(), batches);
        }
        assert_order::<Flat>(options);
    }
}

#[test]
fn schedule_and_precision() {
    let half = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);
    let precise = half.with_reduce_dtype(FloatDType::F32).with_output_dtype(FloatDType::F32);
    let options = FsdpOptions::new();
    for options in [
        options.clone().with_mixed_precision(half),
        options.clone().with_mixed_precision(precise),
        options.clone().with_gather_buffers(1),
        options.clone().with_gather_buffers(3).with_units_ahead(2),
        options.clone().with_backward_prefetch(BackwardPrefetch::Post),
        options.clone().with_backward_prefetch(BackwardPrefetch::None),
        options.clone().with_forward_prefetch(false),
        options.clone().with_reshard_after_forward(ReshardAfterForward::To(2)),
        options.clone().with_persist_below(WIDTH * 37 + 1),
        options.clone().with_wrap(WrapPolicy::NoWrap),
        options.clone().with_quantized_gathers(Some(64)),
        options.with_quantized_reductions(Some(64)),
    ] {
        assert_as_planned::<Flat>(4, options.clone(), 1);
        assert_as_planned::<Model>(4, options, 1);
    }
}

const STEPS: [&str; 5] = ["unshard", "wait_for_unshard", "reshard", "reduce", "wait_for_reduce"];

/// Compares the order of a step with the plan. The gradients of the outermost unit arrive with those
/// of the first unit in no fixed order, so its lines are left out.
fn assert_order<M: Trained + 'static>(options: FsdpOptions) {
    let options = options.with_seed(3);
    let what = format!("{options:?}");
    on_ranks(2, move |worker| {
        let mesh = Mesh::new(worker.rank(), worker.world());
        let model = M::new(worker.device());
        let plan = StepPlan::new(&model, mesh, &options)?;
        let model = fully_shard(model, worker, options.clone())?;
        let ids = || Tensor::from_data([[1, 5, 36], [7, 0, 2]], worker.device());
        model.backward(loss(model.run(ids())))?;
        let (gradients, found) = record(|| model.backward(loss(model.run(ids()))));
        gradients?;
        let inner = |lines: Vec<String>| -> Vec<String> {
            lines.into_iter().filter(|line| !line.ends_with("(root)")).collect()
        };
        assert_eq!(inner(only(&found, &STEPS)), inner(plan.order(1)), "{what}");
        Ok(())
    });
}

#[test]
fn a_plan_has_the_order_of_a_real_step() {
    let options = FsdpOptions::new();
    for options in [
        options.clone(),
        options.clone().with_backward_prefetch(BackwardPrefetch::Post),
        options.clone().with_gather_buffers(1),
        options.clone().with_gather_buffers(3).with_units_ahead(2),
        options.clone().with_strategy(ShardingStrategy::ShardGradOp),
        options.clone().with_activation_checkpointing(ActivationCheckpointing::All),
        options.with_reductions_in_flight(2),
    ] {
        assert_order::<Flat>(options);
    }
}

/// The simulated memory over time has the peak of the accounting.
#[test]
fn gradients_over_time_have_the_peak_of_a_real_step() {
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
        let options = FsdpOptions::new().with_strategy(strategy).with_seed(3);
        on_ranks(2, move |worker| {
            let mesh = Mesh::new(worker.rank(), worker.world());
            let model = Flat::new(worker.device());
            let plan = StepPlan::new(&model, mesh, &options)?;
            let cluster = Cluster::processor(1e9, 1e10, 1 << 30);
            let estimate = plan.estimate(Batch::new(2, 3), &cluster);
            let model = fully_shard(model, worker, options.clone())?;
            let ids = Tensor::from_data([[1, 5, 36], [7, 0, 2]], worker.device());
            model.backward(loss(model.run(ids)))?;
            assert_eq!(model.stats().memory().gradients.peak, estimate.peak_gradients());
            Ok(())
        });
    }
}
