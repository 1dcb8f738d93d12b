//! Units whose matrices have several dtypes: each dtype has a flat range, gather buffers and an
//! all-gather of its own.

mod buffers;
mod model;

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{AdafactorConfig, GradientsParams, LambConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, FloatDType, Tensor};
use fsdp_runtime::__private::FlatLayout;
use fsdp_runtime::memory::MemoryForecast;
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;
use fsdp_runtime::{Error, Mesh, WorldSize};
use model::{
    BLOCKS, Block, FULL, HALF, HIDDEN, Net, OTHER, Plain, ROWS, Run, WIDTH, gradients, on_ranks,
    rows,
};

use crate::support::compare::{Within, assert_close, assert_same_state, assert_state_differs};

type Values = BTreeMap<String, Vec<f32>>;

fn options() -> FsdpOptions {
    FsdpOptions::new()
}

/// Reads the gradients of an unsharded model by path.
struct Read<'a> {
    grads: &'a GradientsParams,
    path: Vec<String>,
    found: Values,
}

impl ModuleVisitor for Read<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = self.grads.get::<D>(param.id).expect("every weight has a gradient");
        let elements = gradient.into_data().iter::<f32>().collect();
        self.found.insert(self.path.join("."), elements);
    }
}

/// Returns the loss of plain Burn on the rows of all ranks, and its gradients divided by the number
/// of ranks, as a mean over ranks has them. Micro-batches are computed one by one, because a row's
/// rounding depends on the number of rows.
fn plain(state: &FullState, step: usize, batches: usize, worker: &Worker) -> (f32, Values) {
    let net = Net::of_state(state, worker.device());
    let world = worker.world().size() as f32;
    let (mut value, mut sums) = (0.0, Values::new());
    for batch in 0..batches {
        let rows = rows(step, batch * ROWS..(batch + 1) * ROWS, worker.device());
        let loss = model::loss(net.forward(rows));
        value += loss.clone().into_scalar::<f32>();
        let grads = GradientsParams::from_grads(loss.backward(), &net);
        let mut read = Read { grads: &grads, path: Vec::new(), found: Values::new() };
        net.visit(&mut read);
        for (path, elements) in read.found {
            let sum = sums.entry(path).or_insert_with(|| vec![0.0; elements.len()]);
            sum.iter_mut().zip(elements).for_each(|(sum, element)| *sum += element / world);
        }
    }
    (value, sums)
}

/// Returns the rounding error of a sum over ranks and rows in a dtype, relative to the largest
/// element.
fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => 1.0 / 64.0,
        DType::F16 => 1.0 / 512.0,
        _ => 1e-5,
    }
}

fn assert_near_plain_burn(
    options: &FsdpOptions,
    batches: usize,
    worker: &Worker,
) -> Result<(), Error> {
    let net = Net::new(worker.device());
    let mut net = fully_shard(net, worker, options.clone())?;
    for step in 0..3 {
        let before = net.state().full(Recipient::All)?;
        let (expected_loss, expected) = plain(&before, step, batches, worker);
        let mut sum = [0.0];
        let grads = gradients(&net, worker, step, batches, |loss| sum[0] += f64::from(loss))?;
        worker.all_reduce_sum(&mut sum)?;
        let difference = (sum[0] - f64::from(expected_loss)).abs();
        assert!(difference <= 1e-5 * f64::from(expected_loss), "{} {expected_loss}", sum[0]);
        // A step of plain descent with a rate of 1 subtracts the gradients.
        net = SgdConfig::new().init().step(1.0, net, grads);
        let after = net.state().full(Recipient::All)?;
        assert_eq!(
            after.len() + 1,
            expected.len(),
            "all parameters but the second place of the tied weight"
        );
        for (path, after) in &after {
            let found = before[path].iter::<f32>().zip(after.iter::<f32>()).map(|(a, b)| a - b);
            let found: Vec<f32> = found.collect();
            assert_eq!(found.len(), before[path].num_elements(), "`{path}`");
            let expected = &expected[path];
            let largest = expected.iter().fold(0f32, |most, element| most.max(element.abs()));
            assert!(largest > 1e-3, "`{path}` has a gradient");
            let within = Within::Absolute((tolerance(model::dtype(path)) * largest).into());
            assert_close(&found, expected, within, format_args!("`{path}`, step {step}"));
        }
        net.state_mut().load_full(&before, Recipient::All)?;
    }
    Ok(())
}

#[test]
fn losses_and_gradients_are_those_of_plain_burn() {
    for world in 1..=4 {
        for batches in [1, 2] {
            on_ranks(world, move |worker| assert_near_plain_burn(&options(), batches, worker));
        }
    }
    let hybrid = options().with_strategy(ShardingStrategy::HybridShard).with_shard_size(2);
    on_ranks(4, move |worker| assert_near_plain_burn(&hybrid, 1, worker));
}

fn assert_same(found: &Run, expected: &Run) {
    assert_all_same([found.clone()], expected);
}

/// Asserts that each of the runs gives the bits of `expected`, which runs once.
fn assert_all_same(found: impl IntoIterator<Item = Run>, expected: &Run) {
    let b = expected.launch();
    for found in found {
        let a = found.launch();
        assert_eq!((&a.losses, &a.norms), (&b.losses, &b.norms), "{found:?}");
        assert_same_state(&a.state, &b.state, format_args!("{found:?}"));
    }
}

#[test]
fn strategies_agree_bit_for_bit() {
    let own = MixedPrecisionPolicy::new();
    let hold = GradientAccumulation::HoldUnsharded;
    for world in 1..=4 {
        for policy in
            [own, own.with_reduce_dtype(FloatDType::F32), own.with_reduce_dtype(FloatDType::BF16)]
        {
            for (accumulation, batches) in [
                (GradientAccumulation::default(), 1),
                (GradientAccumulation::default(), 2),
                (hold, 2),
            ] {
                let options =
                    options().with_mixed_precision(policy).with_gradient_accumulation(accumulation);
                let full = Run { batches, ..Run::new(world, options.clone()) };
                let strategies = [ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard];
                let runs = strategies.map(|strategy| Run {
                    options: options.clone().with_strategy(strategy),
                    ..full.clone()
                });
                assert_all_same(runs, &full);
            }
        }
    }
}

#[test]
fn options_of_schedule_and_offload_change_no_bit() {
    let full = Run::new(4, options());
    let changed = [
        options().with_reshard_after_forward(ReshardAfterForward::To(2)),
        options().with_gather_buffers(1),
        options().with_gather_buffers(3),
        options().with_forward_prefetch(false).with_backward_prefetch(BackwardPrefetch::None),
        options().with_backward_prefetch(BackwardPrefetch::Post),
        options().with_offload(OffloadPolicy::Params { pin_memory: false }),
        options().with_offload(OffloadPolicy::OptimizerOnly),
        options().with_activation_checkpointing(ActivationCheckpointing::All),
    ];
    assert_all_same(changed.map(|options| Run { options, ..full.clone() }), &full);
}

/// Returns the elements of a flat range of these matrices, padding included.
fn padded(world: usize, numels: &[usize]) -> usize {
    let world = WorldSize::new(world).expect("a world has a rank");
    FlatLayout::new(numels.iter().copied(), world).padded_len()
}

#[test]
fn each_dtype_has_its_own_gathers_and_buffers() {
    let steps = 3;
    for world in 1..=4 {
        let outcome = Run::new(world, options()).launch();
        // The root, the last inner unit and the last unit of the blocks' level stay gathered from
        // forward to backward.
        let inner = 2 * (2 * BLOCKS - 1);
        let gathers = 2 + 3 * 2 * BLOCKS + inner + 1;
        assert_eq!(outcome.counts.all_gathers, steps * gathers);
        let units = 1 + BLOCKS + BLOCKS + 1;
        assert_eq!(outcome.counts.reduce_scatters, steps * units, "one reduce-scatter a unit");
        assert_eq!((outcome.counts.mis_prefetches, outcome.counts.added_gather_buffers), (0, 0));

        let bytes = |dtype: DType, numels: &[usize]| padded(world, numels) * dtype.size();
        let root = bytes(HALF, &[5 * WIDTH]) + bytes(FULL, &[WIDTH * WIDTH]);
        let block = bytes(FULL, &[WIDTH * HIDDEN, 7 * WIDTH])
            + bytes(HALF, &[HIDDEN * HIDDEN])
            + bytes(OTHER, &[HIDDEN * 7]);
        let inner = bytes(HALF, &[HIDDEN * 9]) + bytes(FULL, &[9 * HIDDEN]);
        assert_eq!(outcome.gather_buffer_bytes, root + 2 * block + 2 * inner);
        assert_eq!(outcome.peak_unsharded_bytes, root + 2 * block + 2 * inner);
    }
}

#[test]
fn a_mixed_precision_policy_gives_all_matrices_one_dtype() {
    let policy = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);
    let half = Run::new(2, options().with_mixed_precision(policy));
    let outcome = half.launch();
    let units_gathered = 1 + 2 * BLOCKS + (2 * BLOCKS - 1) + 1;
    assert_eq!(outcome.counts.all_gathers, 3 * units_gathered);
    let options = half.options.clone().with_strategy(ShardingStrategy::NoShard);
    assert_same(&Run { options, ..half.clone() }, &half);
    assert_ne!(outcome.losses, Run::new(2, FsdpOptions::new()).launch().losses);
}

/// Compares memory with the forecast, to the byte. The forecast of the gradients of a unit that
/// contains units is an upper bound: it assumes that all of the outer unit's gradients arrive
/// first.
fn assert_as_forecast(world: usize, options: FsdpOptions, batches: usize) {
    let what = format!("{world} ranks, {batches} batches, {options:?}");
    on_ranks(world, move |worker| {
        let model = Net::new(worker.device());
        let mesh = Mesh::new(worker.rank(), worker.world());
        let forecast = MemoryForecast::new(&model, mesh, &options)?;
        let forecast = if batches > 1 { forecast.with_accumulation() } else { forecast };
        let mut model = fully_shard(model, worker, options.clone())?;
        for step in 0..2 {
            let grads = gradients(&model, worker, step, batches, |_| ())?;
            model = SgdConfig::new().init().step(1e-2, model, grads);
        }
        let (memory, host) = (model.stats().memory(), model.stats().host_memory());
        let what = format!("{what}\n{memory}\n{host}\n{forecast}");
        let found = [memory.shards, memory.replicated, memory.gathered];
        let expected = [forecast.shards, forecast.replicated, forecast.gathered];
        assert_eq!(found.map(|usage| usage.peak), expected, "{what}");
        let found = [host.shards, host.replicated, host.gradients];
        let expected = [forecast.host.shards, forecast.host.replicated, forecast.host.gradients];
        assert_eq!(found.map(|usage| usage.peak), expected, "{what}");
        match options == options.clone().with_wrap(WrapPolicy::Annotated) {
            true => assert!(memory.gradients.peak <= forecast.gradients, "{what}"),
            false => assert_eq!(memory.gradients.peak, forecast.gradients, "{what}"),
        }
        assert_eq!(memory.gathered.now, model.stats().gather_buffer_bytes());
        Ok(())
    });
}

#[test]
fn memory_is_as_forecast() {
    let own = MixedPrecisionPolicy::new();
    let hold = GradientAccumulation::HoldUnsharded;
    for wrap in [WrapPolicy::Annotated, WrapPolicy::TransformerBased(unit_types![Block, Plain])] {
        for world in [1, 2, 4] {
            assert_as_forecast(world, options().with_wrap(wrap), 1);
        }
        let options = options().with_wrap(wrap);
        for strategy in [ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard] {
            assert_as_forecast(2, options.clone().with_strategy(strategy), 1);
        }
        let part = ReshardAfterForward::To(2);
        assert_as_forecast(4, options.clone().with_reshard_after_forward(part), 1);
        for policy in [own, own.with_reduce_dtype(FloatDType::F32)] {
            let options = options.clone().with_mixed_precision(policy);
            assert_as_forecast(2, options.clone(), 2);
            assert_as_forecast(2, options.clone().with_gradient_accumulation(hold), 3);
            assert_as_forecast(2, options.clone().with_offload(OffloadPolicy::OptimizerOnly), 1);
            assert_as_forecast(
                2,
                options.with_offload(OffloadPolicy::Params { pin_memory: false }),
                1,
            );
        }
    }
}

/// The device copies of offloaded shards have the dtype in which each is gathered.
#[test]
fn device_copies_of_offloaded_shards_have_the_gathered_dtype() {
    on_ranks(2, |worker| {
        let options = options().with_offload(OffloadPolicy::OptimizerOnly);
        let model = fully_shard(Net::new(worker.device()), worker, options)?;
        let state = model.state().sharded();
        let sharded = state.iter().filter(|(_, part)| part.shape.len() == 2);
        let bytes = sharded.map(|(path, part)| part.range.len() * model::dtype(path).size());
        let bytes: usize = bytes.sum();
        assert!(bytes > 0);
        assert_eq!(model.stats().memory().shards.now, bytes);
        Ok(())
    });
}

#[test]
fn checkpoints_load_at_other_worlds_and_in_other_dtypes() {
    let folder = tempfile::tempdir().expect("a folder");
    let one_type = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::F32);
    let one_type = options().with_mixed_precision(one_type);
    for saved_as in [options(), one_type.clone()] {
        let path = folder.path().join(format!("saved {}", saved_as == options()));
        let save = Run { save: Some(path.clone()), ..Run::new(2, saved_as) };
        let saved = save.launch();
        for world in 1..=4 {
            for loaded_as in [options(), one_type.clone()] {
                let load = Run { steps: 0, from: Some(path.clone()), ..Run::new(world, loaded_as) };
                let what = format_args!("{world} ranks");
                assert_same_state(&load.launch().state, &saved.state, what);
            }
        }
        // Training resumes from it under another strategy.
        let full = Run { from: Some(path), ..Run::new(3, options()) };
        let none = options().with_strategy(ShardingStrategy::NoShard);
        assert_same(&Run { options: none, ..full.clone() }, &full);
    }
}

#[test]
fn state_dicts_are_taken_and_loaded() {
    on_ranks(3, |worker| {
        let sharded = |step: usize| -> Result<Fsdp<Net>, Error> {
            let net = fully_shard(Net::new(worker.device()), worker, options())?;
            let grads = gradients(&net, worker, step, 1, |_| ())?;
            Ok(SgdConfig::new().init().step(1e-2, net, grads))
        };
        let (net, mut other) = (sharded(0)?, sharded(1)?);
        let (full, own) = (net.state().full(Recipient::All)?, other.state().full(Recipient::All)?);
        assert!(full.values().all(|data| data.dtype() == DType::F32), "shards are in f32");
        assert_state_differs(&full, &own, "models that were trained differently");
        assert_eq!(net.state().sharded().len(), full.len());
        for (path, part) in net.state().sharded().iter() {
            let elements: Vec<f32> = full[path].iter().collect();
            let found: Vec<f32> = part.data.iter().collect();
            assert_eq!(found, elements[part.range.clone()], "{path}");
        }
        other.state_mut().load_sharded(&net.state().sharded())?;
        assert_same_state(&other.state().full(Recipient::All)?, &full, "loaded");
        other.state_mut().load_full(&own, Recipient::All)?;
        assert_same_state(&other.state().full(Recipient::All)?, &own, "loaded");
        other.state_mut().load_local(&net.state().local())?;
        assert_same_state(&other.state().full(Recipient::All)?, &full, "loaded");
        Ok(())
    });
}

#[test]
fn optimizers_of_whole_matrices_give_what_they_give_unsharded() {
    let optimizers: [fn() -> ModuleOptimizer; 2] =
        [|| LambConfig::new().init(), || AdafactorConfig::new().init()];
    for whole in optimizers {
        for world in [1, 2, 3] {
            let full = Run { whole: Some(whole), ..Run::new(world, options()) };
            let none = options().with_strategy(ShardingStrategy::NoShard);
            assert_same(&full, &Run { options: none, ..full.clone() });
        }
    }
}
