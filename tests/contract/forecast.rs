//! A memory forecast is what the model then holds, kind by kind, to the byte.

use std::collections::HashMap;

use burn::module::{Lora, Module, ModuleVisitor, Param, ParamId};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use fsdp_runtime::memory::{MemoryError, MemoryForecast};
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Mesh, Rank, WorldSize};

use super::mlp::{Block, Mlp, WIDTH, loss, of_rank_0, on_ranks};

/// A model whose root unit has a tied weight at both ends.
#[derive(Module, Debug)]
#[fsdp_unit(root, tie("tokens" = "output"))]
struct Tied {
    tokens: Embedding,
    output: Param<Tensor<2>>,
    blocks: Vec<Block>,
    norm: LayerNorm,
}

#[fsdp_unit]
impl Tied {
    fn forward(&self, ids: Tensor<2, Int>) -> Tensor<2> {
        let [rows, length] = ids.dims();
        let x = self.tokens.forward(ids).reshape([rows * length, WIDTH]);
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        self.norm.forward(x).matmul(self.output.val().transpose())
    }
}

impl Tied {
    fn new(blocks: usize, device: &Device) -> Self {
        let tokens = EmbeddingConfig::new(37, WIDTH).init(device);
        Self {
            output: tokens.weight.clone(),
            tokens,
            blocks: (0..blocks).map(|_| Block::new(device)).collect(),
            norm: LayerNormConfig::new(WIDTH).init(device),
        }
    }
}

/// Compares the memory of two steps, of `batches` micro-batches each, with the forecast.
fn assert_as_forecast(world: usize, options: FsdpOptions, batches: usize) {
    assert_model_as_forecast(|device| Tied::new(4, device), world, options, batches);
}

/// Compares the memory of two steps of the model that `new` makes with its forecast.
fn assert_model_as_forecast(
    new: fn(&Device) -> Tied,
    world: usize,
    options: FsdpOptions,
    batches: usize,
) {
    let options = options.with_optimizer_check(false);
    let what = format!("{world} ranks, {batches} batches, {options:?}");
    on_ranks(world, move |worker| {
        let device = worker.device();
        let mesh = Mesh::new(worker.rank(), worker.world());
        let model = new(device);
        let forecast = MemoryForecast::new(&model, mesh, &options)?.with_optimizer(2);
        let forecast = if batches > 1 { forecast.with_accumulation() } else { forecast };
        assert!(!model.tokens.weight.is_initialized(), "a forecast initialises no parameter");

        let mut model = fully_shard(model, worker, options.clone().with_seed(3))?;
        let mut adam = AdamWConfig::new().init();
        for _ in 0..2 {
            let ids = || Tensor::from_data([[1, 5, 36], [7, 0, 2]], device);
            for _ in 1..batches {
                model.accumulate(loss(model.forward(ids())))?;
            }
            let gradients = model.backward(loss(model.forward(ids())))?;
            model = adam.step(1e-3, model, gradients);
        }
        let memory = model.stats().memory();
        let found = [memory.shards, memory.replicated, memory.gathered, memory.gradients];
        let expected =
            [forecast.shards, forecast.replicated, forecast.gathered, forecast.gradients];
        assert_eq!(found.map(|usage| usage.peak), expected, "{what}\n{memory}\n{forecast}");
        let host = model.stats().host_memory();
        let found = [host.shards, host.replicated, host.gradients];
        let expected = [forecast.host.shards, forecast.host.replicated, forecast.host.gradients];
        assert_eq!(found.map(|usage| usage.peak), expected, "{what}\n{host}\n{forecast}");
        let mut elements = Elements::default();
        model.visit(&mut elements);
        let stored = if forecast.host.total() > 0 { host } else { memory };
        let held = match elements.any_frozen {
            true => elements.trained.values().sum::<usize>() * size_of::<f32>(),
            false => stored.shards.now + stored.replicated.now,
        };
        assert!(held > 0, "{what}");
        assert_eq!(forecast.optimizer + forecast.host.optimizer, 2 * held, "{what}");
        Ok(())
    });
}

/// Number of elements of each parameter that requires a gradient: of this rank's shard. An empty shard is
/// stored as one element, and no shard here has one.
#[derive(Default)]
struct Elements {
    trained: HashMap<ParamId, usize>,
    any_frozen: bool,
}

impl ModuleVisitor for Elements {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let base = param.base();
        let elements = base.shape().num_elements();
        if base.is_require_grad() {
            self.trained.insert(param.id, if elements > 1 { elements } else { 0 });
        } else {
            self.any_frozen = true;
        }
    }
}

/// Returns a model of four blocks whose tied weight and first block are frozen, and whose second one has
/// adapters.
fn partly_frozen(device: &Device) -> Tied {
    let model = Tied::new(4, device);
    let blocks = model.blocks.into_iter().enumerate();
    let blocks = blocks.map(|(at, block)| match at {
        0 => block.freeze(),
        1 => block.apply_lora(Lora::new(2, 4.0)),
        _ => block,
    });
    let [tokens, output] = [model.tokens.weight, model.output].map(|w| w.set_require_grad(false));
    let tokens = Embedding { weight: tokens };
    Tied { tokens, output, blocks: blocks.collect(), norm: model.norm }
}

/// Frozen parameters have neither gradients nor optimizer state.
#[test]
fn frozen_parameters() {
    let options = FsdpOptions::new();
    for options in [
        options.clone(),
        options.clone().with_strategy(ShardingStrategy::NoShard),
        options.with_offload(OffloadPolicy::Params { pin_memory: false }),
    ] {
        for (world, batches) in [(1, 1), (2, 1), (2, 3)] {
            assert_model_as_forecast(partly_frozen, world, options.clone(), batches);
        }
    }
}

/// The check of the optimizer leaves state that belongs to no parameter.
#[test]
fn the_optimizer_and_what_its_check_leaves() {
    let offload = OffloadPolicy::Params { pin_memory: false };
    for options in [
        FsdpOptions::new(),
        FsdpOptions::new().with_optimizer_check(false),
        FsdpOptions::new().with_offload(offload),
        FsdpOptions::new().with_strategy(ShardingStrategy::NoShard),
    ] {
        let (state, shards) = optimizer_as_forecast(|device| Tied::new(4, device), &options);
        assert!(state >= 2 * shards);
        let (state_of_some, _) = optimizer_as_forecast(partly_frozen, &options);
        assert!(state_of_some > 0);
    }
}

/// Compares the bytes of Adam's state in the model that `new` makes with the forecast. Returns them, and
/// those of the shards.
fn optimizer_as_forecast(new: fn(&Device) -> Tied, options: &FsdpOptions) -> (usize, usize) {
    let what = format!("{options:?}");
    let options = options.clone();
    of_rank_0(2, move |worker| {
        let device = worker.device();
        let mesh = Mesh::new(worker.rank(), worker.world());
        let model = new(device);
        let forecast = MemoryForecast::new(&model, mesh, &options)?.with_optimizer(2);
        let mut model = fully_shard(model, worker, options.clone().with_seed(3))?;
        let mut adam = AdamWConfig::new().init();
        for _ in 0..4 {
            let ids = Tensor::from_data([[1, 5, 36], [7, 0, 2]], device);
            let gradients = model.backward(loss(model.forward(ids)))?;
            model = adam.step(1e-3, model, gradients);
        }
        model.stats().record_optimizer(&adam)?;
        let (device, host) = (model.stats().memory(), model.stats().host_memory());
        let found = [device.optimizer.now, host.optimizer.now];
        assert_eq!(found, [forecast.optimizer, forecast.host.optimizer], "{what}");
        Ok((found[0] + found[1], model.stats().sharded_bytes()))
    })
}

#[test]
fn strategies_and_worlds() {
    for (strategy, _) in ShardingStrategy::ALL {
        for world in [1, 2, 4] {
            let shard_size = if world == 4 { 2 } else { world };
            let options = FsdpOptions::new().with_strategy(strategy).with_shard_size(shard_size);
            assert_as_forecast(world, options, 1);
        }
    }
}

#[test]
fn options_that_cost_memory() {
    let options = FsdpOptions::new();
    assert_as_forecast(2, options.clone().with_gather_buffers(1), 1);
    assert_as_forecast(2, options.clone().with_gather_buffers(3), 1);
    assert_as_forecast(2, options.clone().with_persist_below(WIDTH * 37 + 1), 1);
    assert_as_forecast(2, options.clone().with_wrap(WrapPolicy::NoWrap), 1);
    assert_as_forecast(4, options.with_reshard_after_forward(ReshardAfterForward::To(2)), 1);
}

/// Whether a reduction has ended while the gradients of the next unit arrive is a matter of time.
/// So the forecast is the most that there can be.
#[test]
fn reductions_in_flight() {
    for (world, in_flight, batches) in [(2, 2, 1), (2, 3, 1), (4, 2, 1), (2, 2, 2)] {
        for accumulation in [GradientAccumulation::ReduceEach, GradientAccumulation::HoldUnsharded]
        {
            let one = FsdpOptions::new().with_seed(3).with_gradient_accumulation(accumulation);
            let several = one.clone().with_reductions_in_flight(in_flight);
            let [of_one, of_several] = [one, several].map(|options| {
                of_rank_0(world, move |worker| gradients(worker, &options, batches))
            });
            assert_eq!(of_one.0, of_several.0, "losses and weights have the same bits");
            let ((_, peak, forecast), (_, of_one, _)) = (of_several, of_one);
            assert!(of_one <= peak && peak <= forecast, "{of_one} {peak} {forecast}");
            assert!(of_one < forecast, "another reduction takes memory");
        }
    }
}

/// Trains two steps. Returns the losses and the weights, the peak of the gradients, and its
/// forecast.
fn gradients(
    worker: &Worker,
    options: &FsdpOptions,
    batches: usize,
) -> Result<(Vec<f32>, usize, usize), Error> {
    let mesh = Mesh::new(worker.rank(), worker.world());
    let model = Tied::new(4, worker.device());
    let forecast = MemoryForecast::new(&model, mesh, options)?;
    let forecast = if batches > 1 { forecast.with_accumulation() } else { forecast };
    let mut model = fully_shard(model, worker, options.clone())?;
    let mut adam = AdamWConfig::new().init();
    let mut values = Vec::new();
    for _ in 0..2 {
        let ids = || Tensor::from_data([[1, 5, 36], [7, 0, 2]], worker.device());
        for _ in 1..batches {
            model.accumulate(loss(model.forward(ids())))?;
        }
        let loss = loss(model.forward(ids()));
        values.push(loss.clone().inner().into_scalar::<f32>());
        let gradients = model.backward(loss)?;
        model = adam.step(1e-3, model, gradients);
    }
    let peak = model.stats().memory().gradients.peak;
    values.extend(model.materialize().output.val().into_data().iter::<f32>());
    Ok((values, peak, forecast.gradients))
}

#[test]
fn precision_and_offload() {
    let half = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);
    let precise = half.with_reduce_dtype(FloatDType::F32).with_output_dtype(FloatDType::F32);
    let params = OffloadPolicy::Params { pin_memory: false };
    for policy in [MixedPrecisionPolicy::new(), half, precise] {
        for offload in [OffloadPolicy::None, params, OffloadPolicy::OptimizerOnly] {
            let options = FsdpOptions::new().with_mixed_precision(policy).with_offload(offload);
            assert_as_forecast(2, options.clone().with_persist_below(usize::MAX), 1);
            for batches in [1, 2] {
                assert_as_forecast(2, options.clone(), batches);
            }
            let hold = GradientAccumulation::HoldUnsharded;
            assert_as_forecast(2, options.with_gradient_accumulation(hold), 2);
        }
    }
}

#[test]
fn quantized_gathers_and_reductions() {
    let options = FsdpOptions::new().with_quantized_gathers(Some(64));
    for options in [options.clone(), options.with_quantized_reductions(Some(64))] {
        for (world, batches) in [(2, 1), (2, 2), (4, 1)] {
            assert_as_forecast(world, options.clone(), batches);
        }
    }
}

#[test]
fn accumulation() {
    for accumulation in [GradientAccumulation::ReduceEach, GradientAccumulation::HoldUnsharded] {
        for batches in [2, 3] {
            let options = FsdpOptions::new().with_gradient_accumulation(accumulation);
            assert_as_forecast(2, options, batches);
        }
    }
}

/// A forecast of a model far too large for any machine allocates nothing. Its error shows the
/// table.
#[test]
fn a_model_that_does_not_fit_is_refused() {
    let device = burn::tensor::Device::flex();
    let tokens = EmbeddingConfig::new(1 << 30, WIDTH).init(&device);
    let model = Tied { output: tokens.weight.clone(), tokens, ..Tied::new(1, &device) };
    let world = WorldSize::new(2).expect("two ranks");
    let forecast =
        MemoryForecast::new(&model, Mesh::new(Rank::ZERO, world), &FsdpOptions::new()).unwrap();
    let forecast = forecast.with_optimizer(2).with_activations(1 << 20);
    assert!(forecast.shards > (WIDTH * 4) << 29);
    let kinds: Vec<_> = forecast.kinds().collect();
    assert_eq!(kinds[..6].iter().map(|(_, bytes)| bytes).sum::<usize>(), forecast.total());
    let error = forecast.check(64 << 30).unwrap_err();
    let expected = MemoryError::DoesNotFit { available: 64 << 30, forecast: Box::new(forecast) };
    assert_eq!(error, expected);
    for part in ["65536.00 MiB", "activations         1.00", "more ranks"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    assert!(forecast.check(forecast.total()).is_ok());
}

#[test]
fn a_forecast_checks_the_options() {
    let model = Mlp::new(1, &burn::tensor::Device::flex());
    let mesh = Mesh::new(Rank::ZERO, WorldSize::new(2).expect("two ranks"));
    let options = FsdpOptions::new();
    let none = [options.clone().with_gather_buffers(0), options.with_reductions_in_flight(0)];
    for (options, name) in none.into_iter().zip(["gather_buffers", "reductions_in_flight"]) {
        let error = MemoryForecast::new(&model, mesh, &options).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    }
}
