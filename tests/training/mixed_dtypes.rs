//! Units whose matrices have several types: a flat range, a buffer and an all-gather for each type,
//! and one unit in all else.

mod buffers;
mod model;

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{AdafactorConfig, GradientsParams, LambConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, FloatDType, Tensor};
use fsdp_runtime::__private::FlatLayout;
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Error, FullState, MemoryForecast, Mesh, WorldSize};
use model::{
    BLOCKS, Block, FULL, HALF, HIDDEN, Net, OTHER, Plain, ROWS, Run, WIDTH, gradients, on, rows,
};

use crate::support::checkpoint::same_bits;

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

/// The loss of plain Burn on the rows of all ranks, and the gradients, as the mean over ranks takes
/// them. Micro-batches are added up as they are: the rounding of a row depends on how many there are.
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

/// What a type's rounding leaves of a sum over ranks and rows, relative to the largest element.
fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => 1.0 / 64.0,
        DType::F16 => 1.0 / 512.0,
        _ => 1e-5,
    }
}

fn is_near_plain_burn(options: &FsdpOptions, batches: usize, worker: &Worker) -> Result<(), Error> {
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
        // A step of plain descent tells the gradients.
        net = SgdConfig::new().init().step(1.0, net, grads);
        let after = net.state().full(Recipient::All)?;
        assert_eq!(after.len() + 1, expected.len(), "all but the second place of the tied weight");
        for (path, after) in &after {
            let found = before[path].iter::<f32>().zip(after.iter::<f32>()).map(|(a, b)| a - b);
            let expected = &expected[path];
            let largest = expected.iter().fold(0f32, |most, element| most.max(element.abs()));
            assert!(largest > 1e-3, "`{path}` has a gradient");
            for (a, b) in found.zip(expected) {
                let bound = tolerance(model::dtype(path)) * largest;
                assert!((a - b).abs() <= bound, "`{path}`, step {step}: {a} {b}, of {largest}");
            }
        }
        net.state_mut().load_full(&before, Recipient::All)?;
    }
    Ok(())
}

#[test]
fn losses_and_gradients_are_those_of_plain_burn() {
    for world in 1..=4 {
        for batches in [1, 2] {
            on(world, move |worker| is_near_plain_burn(&options(), batches, worker));
        }
    }
    let hybrid = options().with_strategy(ShardingStrategy::HybridShard).with_shard_size(2);
    on(4, move |worker| is_near_plain_burn(&hybrid, 1, worker));
}

fn assert_same(found: &Run, expected: &Run) {
    let (a, b) = (found.launch(), expected.launch());
    assert_eq!((a.losses, a.norms), (b.losses, b.norms), "{found:?}");
    assert!(same_bits(&a.state, &b.state), "{found:?}");
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
                for strategy in [ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard] {
                    let options = options.clone().with_strategy(strategy);
                    assert_same(&Run { options, ..full.clone() }, &full);
                }
            }
        }
    }
}

#[test]
fn what_is_kept_prefetched_or_offloaded_changes_no_bit() {
    let full = Run::new(4, options());
    for options in [
        options().with_reshard_after_forward(ReshardAfterForward::To(2)),
        options().with_gather_buffers(1),
        options().with_gather_buffers(3),
        options().with_forward_prefetch(false).with_backward_prefetch(BackwardPrefetch::None),
        options().with_backward_prefetch(BackwardPrefetch::Post),
        options().with_offload(OffloadPolicy::Params { pin_memory: false }),
        options().with_offload(OffloadPolicy::OptimizerOnly),
        options().with_activation_checkpointing(ActivationCheckpointing::All),
    ] {
        assert_same(&Run { options, ..full.clone() }, &full);
    }
}

/// Elements of the flat ranges, padding included.
fn padded(world: usize, numels: &[usize]) -> usize {
    let world = WorldSize::new(world).expect("a world has a rank");
    FlatLayout::new(numels.iter().copied(), world).padded_len()
}

#[test]
fn each_type_has_a_gather_and_buffers_of_its_own() {
    let steps = 3;
    for world in 1..=4 {
        let outcome = Run::new(world, options()).launch();
        // The outermost unit, the last block's inner one and the last of the blocks' level stay
        // gathered from forward to backward.
        let inner = 2 * (2 * BLOCKS - 1);
        let gathers = 2 + 3 * 2 * BLOCKS + inner + 1;
        assert_eq!(outcome.counts.all_gathers, steps * gathers);
        let units = 1 + BLOCKS + BLOCKS + 1;
        assert_eq!(outcome.counts.reduce_scatters, steps * units, "a unit is reduced as one");
        assert_eq!((outcome.counts.mis_prefetches, outcome.counts.added_slots), (0, 0));

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
fn a_policy_makes_one_type_of_all() {
    let policy = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);
    let half = Run::new(2, options().with_mixed_precision(policy));
    let outcome = half.launch();
    let units_gathered = 1 + 2 * BLOCKS + (2 * BLOCKS - 1) + 1;
    assert_eq!(outcome.counts.all_gathers, 3 * units_gathered);
    let options = half.options.clone().with_strategy(ShardingStrategy::NoShard);
    assert_same(&Run { options, ..half.clone() }, &half);
    assert_ne!(outcome.losses, Run::new(2, FsdpOptions::new()).launch().losses);
}

/// What is held is what was forecast, to the byte. Of a unit around others, gradients are forecast as
/// if all of its own had arrived before theirs.
fn held_as_forecast(world: usize, options: FsdpOptions, batches: usize) {
    let told = format!("{world} ranks, {batches} batches, {options:?}");
    on(world, move |worker| {
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
        let told = format!("{told}\n{memory}\n{host}\n{forecast}");
        let found = [memory.shards, memory.replicated, memory.gathered];
        let expected = [forecast.shards, forecast.replicated, forecast.gathered];
        assert_eq!(found.map(|usage| usage.peak), expected, "{told}");
        let found = [host.shards, host.replicated, host.gradients];
        let expected = [forecast.host.shards, forecast.host.replicated, forecast.host.gradients];
        assert_eq!(found.map(|usage| usage.peak), expected, "{told}");
        match options == options.clone().with_wrap(WrapPolicy::Annotated) {
            true => assert!(memory.gradients.peak <= forecast.gradients, "{told}"),
            false => assert_eq!(memory.gradients.peak, forecast.gradients, "{told}"),
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
            held_as_forecast(world, options().with_wrap(wrap), 1);
        }
        let options = options().with_wrap(wrap);
        for strategy in [ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard] {
            held_as_forecast(2, options.clone().with_strategy(strategy), 1);
        }
        let part = ReshardAfterForward::To(2);
        held_as_forecast(4, options.clone().with_reshard_after_forward(part), 1);
        for policy in [own, own.with_reduce_dtype(FloatDType::F32)] {
            let options = options.clone().with_mixed_precision(policy);
            held_as_forecast(2, options.clone(), 2);
            held_as_forecast(2, options.clone().with_gradient_accumulation(hold), 3);
            held_as_forecast(2, options.clone().with_offload(OffloadPolicy::OptimizerOnly), 1);
            held_as_forecast(
                2,
                options.with_offload(OffloadPolicy::Params { pin_memory: false }),
                1,
            );
        }
    }
}

/// What is kept on the device of offloaded shards has the type in which each is gathered.
#[test]
fn copies_that_are_kept_on_the_device_have_the_types_they_are_sent_in() {
    on(2, |worker| {
        let options = options().with_offload(OffloadPolicy::OptimizerOnly);
        let model = fully_shard(Net::new(worker.device()), worker, options)?;
        let state = model.state().sharded();
        let sharded = state.iter().filter(|(_, part)| part.shape.len() == 2);
        let bytes = sharded.map(|(path, part)| part.range.len() * model::dtype(path).size());
        assert_eq!(model.stats().memory().shards.now, bytes.sum::<usize>());
        Ok(())
    });
}

#[test]
fn checkpoints_load_at_other_worlds_and_in_other_types() {
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
                assert!(same_bits(&load.launch().state, &saved.state), "{world} ranks");
            }
        }
        // And training goes on from it in any of the strategies.
        let full = Run { from: Some(path), ..Run::new(3, options()) };
        let none = options().with_strategy(ShardingStrategy::NoShard);
        assert_same(&Run { options: none, ..full.clone() }, &full);
    }
}

#[test]
fn states_in_memory_are_taken_and_loaded() {
    on(3, |worker| {
        let sharded = |step: usize| -> Result<Fsdp<Net>, Error> {
            let net = fully_shard(Net::new(worker.device()), worker, options())?;
            let grads = gradients(&net, worker, step, 1, |_| ())?;
            Ok(SgdConfig::new().init().step(1e-2, net, grads))
        };
        let (net, mut other) = (sharded(0)?, sharded(1)?);
        let (full, own) = (net.state().full(Recipient::All)?, other.state().full(Recipient::All)?);
        assert!(full.values().all(|data| data.dtype() == DType::F32), "they rest in f32");
        assert!(!same_bits(&full, &own));
        for (path, part) in net.state().sharded().iter() {
            let elements: Vec<f32> = full[path].iter().collect();
            let found: Vec<f32> = part.data.iter().collect();
            assert_eq!(found, elements[part.range.clone()], "{path}");
        }
        other.state_mut().load_sharded(&net.state().sharded())?;
        assert!(same_bits(&other.state().full(Recipient::All)?, &full));
        other.state_mut().load_full(&own, Recipient::All)?;
        assert!(same_bits(&other.state().full(Recipient::All)?, &own));
        other.state_mut().load_local(&net.state().local())?;
        assert!(same_bits(&other.state().full(Recipient::All)?, &full));
        Ok(())
    });
}

#[test]
fn whole_optimizers_give_what_they_give_unsharded() {
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
