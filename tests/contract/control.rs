//! Control by unit and at run time. Files: what is prefetched; when units are resharded and how
//! gradients are accumulated; how gradients are divided, and the hook on reduced gradients.

mod gradients;
mod prefetch;
mod reshard;

use burn::optim::SgdConfig;
use burn::tensor::FloatDType;
use fsdp_runtime::errors::{ScheduleError, ShardError};
use fsdp_runtime::options::FsdpConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use super::mlp::{Block, HIDDEN, Mlp, WIDTH, gradient, input, loss, of_rank_0, on_ranks, sharded};
use super::support::compare::{assert_same_bits, assert_same_state};
use super::support::ranks::launch_options;
use super::support::trace::{only, record};
use prefetch::with_lists;

const BLOCKS: usize = 5;
/// Bytes of the gather buffer of a block on two ranks, whose matrices need no padding.
const BLOCK_BYTES: usize = 2 * WIDTH * HIDDEN * size_of::<f32>();

/// What a training run on two ranks has: the state at the end, the bytes of gather buffers, and the
/// numbers of all-gathers and of wrong prefetches.
#[derive(Debug)]
struct Trained {
    norms: Vec<f64>,
    state: FullState,
    buffers: usize,
    all_gathers: usize,
    wrong: usize,
}

impl Trained {
    #[track_caller]
    fn assert_same_bits(&self, other: &Self, what: &str) {
        assert_same_bits(&self.norms, &other.norms, what);
        assert_same_state(&self.state, &other.state, what);
        assert_eq!(self.wrong, 0, "{what}");
    }
}

type Prepare = fn(&Fsdp<Mlp>) -> Result<(), Error>;

/// Trains three steps on two ranks, after `prepare`.
fn train_after(options: FsdpOptions, prepare: Prepare) -> Trained {
    of_rank_0(2, move |worker| {
        let mut model = sharded(BLOCKS, worker, options.clone())?;
        prepare(&model)?;
        let mut optimizer = SgdConfig::new().init();
        let mut norms = Vec::new();
        for step in 0..3 {
            let x = input(worker.rank().index(), step, 4, worker.device());
            let mut gradients = model.backward(loss(model.forward(x)))?;
            norms.push(model.clip_grad_norm(&mut gradients, 1e9)?);
            model = optimizer.step(0.1, model, gradients);
        }
        let counts = model.stats().counts();
        Ok(Trained {
            norms,
            buffers: model.stats().gather_buffer_bytes(),
            all_gathers: counts.all_gathers,
            wrong: counts.mis_prefetches,
            state: model.state().full(Recipient::All)?,
        })
    })
}

fn train(options: FsdpOptions) -> Trained {
    train_after(options, |_| Ok(()))
}

/// Returns the gathers of the second forward and the second backward on two ranks.
fn gathers(options: FsdpOptions, prepare: Prepare) -> (Vec<String>, Vec<String>) {
    of_rank_0(2, move |worker| {
        let model = sharded(BLOCKS, worker, options.clone())?;
        prepare(&model)?;
        let x = || input(worker.rank().index(), 0, 4, worker.device());
        model.backward(loss(model.forward(x())))?;
        let (output, forward) = record(|| loss(model.forward(x())));
        let (gradients, backward) = record(|| model.backward(output));
        gradients?;
        let steps = ["unshard", "wait_for_unshard"];
        Ok((only(&forward, &steps), only(&backward, &steps)))
    })
}

#[test]
fn the_forecast_counts_the_buffers_of_single_units() {
    let options = [
        FsdpOptions::new().with_units_ahead(2),
        with_lists(FsdpOptions::new().with_gather_buffers(1)),
        FsdpOptions::new().with_reshard_after_forward_at(["blocks.1"], ReshardAfterForward::Never),
        FsdpOptions::new().with_reshard_after_backward(false),
    ];
    for options in options {
        of_rank_0(2, move |worker| {
            let mesh = fsdp_runtime::Mesh::new(worker.rank(), worker.world());
            let plain = Mlp::new(BLOCKS, worker.device());
            let forecast = fsdp_runtime::memory::MemoryForecast::new(&plain, mesh, &options)?;
            let model = sharded(BLOCKS, worker, options.clone())?;
            assert_eq!(forecast.gathered, model.stats().gather_buffer_bytes(), "{options:?}");
            assert_eq!(model.stats().memory().gathered.now, forecast.gathered);
            Ok(())
        });
    }
}

/// Trains two steps of three micro-batches. Returns the state, and the all-gathers of each micro-batch

#[test]
fn ranks_that_set_different_things_are_told_so() {
    let error = launch(launch_options(2), |worker| {
        let model = sharded(1, &worker, FsdpOptions::new())?;
        model.set_gradient_divide_factor(1.0 + worker.rank().index() as f64)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("gradient_divide_factor to 1"), "{error}");
    assert!(error.contains("gradient_divide_factor to 2"), "{error}");
}

#[test]
fn settings_do_not_change_between_a_forward_and_its_backward() {
    on_ranks(2, |worker| {
        let model = sharded(2, worker, FsdpOptions::new())?;
        let loss = loss(model.forward(input(0, 0, 4, worker.device())));
        let refused = |changed: Result<(), Error>| {
            let is_refused =
                matches!(changed, Err(Error::Schedule(ScheduleError::ControlledDuringPass { .. })));
            assert!(is_refused, "{changed:?}");
        };
        refused(model.set_reshard_after_forward(ReshardAfterForward::Never));
        refused(model.set_reshard_after_backward(false));
        refused(model.set_gradient_divide_factor(1.0));
        refused(model.unit("blocks.0")?.set_forward_prefetch(&["blocks.1"]));
        model.backward(loss)?;
        model.set_reshard_after_forward(ReshardAfterForward::Never)
    });
}

#[test]
fn units_that_the_model_does_not_have_are_named() {
    let refused = |options: FsdpOptions| {
        let made =
            launch(launch_options(2), move |worker| sharded(2, &worker, options.clone()).map(drop));
        made.unwrap_err().to_string()
    };
    let never = ReshardAfterForward::Never;
    let new = FsdpOptions::new;
    let bf16 = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);
    for (option, options) in [
        ("reshard_after_forward_at", new().with_reshard_after_forward_at(["blocks.7"], never)),
        ("mixed_precision_at", new().with_mixed_precision_at(["blocks.7"], bf16)),
        ("forward_prefetch_at", new().with_forward_prefetch_at("blocks.7", ["blocks.1"])),
        ("backward_prefetch_at", new().with_backward_prefetch_at("blocks.1", ["blocks.7"])),
    ] {
        let error = refused(options);
        assert!(error.contains(option) && error.contains("\"blocks.7\""), "{error}");
        assert!(error.contains("\"blocks.0\""), "the units are named: {error}");
    }
    let other = new().with_reshard_after_forward_for(unit_types![crate::support::Embed], never);
    assert!(refused(other).contains("reshard_after_forward_for"));
    let to = new().with_reshard_after_forward_at(["blocks.0"], ReshardAfterForward::To(3));
    assert!(refused(to).contains("use a divisor of 2"));
    on_ranks(2, |worker| {
        let model = sharded(2, worker, FsdpOptions::new())?;
        let unknown = model.unit("blocks.0")?.set_forward_prefetch(&["blocks.7"]);
        assert!(matches!(unknown, Err(Error::Schedule(ScheduleError::UnknownUnit { .. }))));
        let to = model.set_reshard_after_forward(ReshardAfterForward::To(3));
        assert!(matches!(to, Err(Error::Shard(ShardError::InvalidOption { .. }))), "{to:?}");
        Ok(())
    });
}

#[test]
fn precision_by_path_casts_the_units_at_the_path() {
    let run = |options: FsdpOptions| {
        of_rank_0(2, move |worker| {
            let model = sharded(BLOCKS, worker, options.clone())?;
            let x = input(worker.rank().index(), 0, 4, worker.device());
            let gradients = model.backward(loss(model.forward(x)))?;
            let gradient = gradient(&gradients, &model.blocks[1].up.weight);
            Ok((gradient, model.stats().counts().sent_bytes))
        })
    };
    let bf16 = MixedPrecisionPolicy::new()
        .with_param_dtype(FloatDType::BF16)
        .with_output_dtype(FloatDType::F32);
    let (full, bytes) = run(FsdpOptions::new());
    let (one, of_one) = run(FsdpOptions::new().with_mixed_precision_at(["blocks.1"], bf16));
    // Two all-gathers of half a block, in half as many bytes.
    assert_eq!(bytes - of_one, BLOCK_BYTES / 2);
    assert_ne!(one, full, "the block computes in bf16");
    let of_type = FsdpOptions::new().with_mixed_precision_for(unit_types![Block], bf16);
    let below =
        FsdpOptions::new().with_mixed_precision_at(["blocks.0", "blocks.1", "blocks.2"], bf16);
    let below = below.with_mixed_precision_at(["blocks.3", "blocks.4"], bf16);
    let (by_type, of_type_bytes) = run(of_type.clone());
    let (by_path, of_path_bytes) = run(below);
    assert_eq!((by_path, of_path_bytes), (by_type, of_type_bytes));
    let but_one = of_type.with_mixed_precision_at(["blocks.1"], MixedPrecisionPolicy::new());
    assert_eq!(run(but_one).1 - of_type_bytes, BLOCK_BYTES / 2, "the path overrides the type");
}

#[test]
fn a_configuration_has_the_options_of_units() {
    let never = ReshardAfterForward::Never;
    let bf16 = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);
    let config = FsdpConfig::new()
        .with_reshard_after_forward_for(vec![("Block".into(), never)])
        .with_reshard_after_forward_at(vec![("blocks.1".into(), ReshardAfterForward::Always)])
        .with_reshard_after_backward(false)
        .with_units_ahead(Some(2))
        .with_forward_prefetch_for(vec![("Mlp".into(), vec!["Block".into(), "Block".into()])])
        .with_backward_prefetch_for(vec![("Block".into(), vec![])])
        .with_forward_prefetch_at(vec![("blocks.0".into(), vec!["blocks.1".into()])])
        .with_backward_prefetch_at(vec![("blocks.1".into(), vec![])])
        .with_mixed_precision_at(vec![("blocks.0".into(), bf16)])
        .with_gradient_divide_factor(Some(1.0));
    let file = config.to_string();
    let loaded = <FsdpConfig as burn::config::Config>::load_binary(file.as_bytes()).unwrap();
    assert_eq!(loaded, config);
    let expected = FsdpOptions::new()
        .with_reshard_after_forward_for(unit_types![Block], never)
        .with_reshard_after_forward_at(["blocks.1"], ReshardAfterForward::Always)
        .with_reshard_after_backward(false)
        .with_units_ahead(2)
        .with_forward_prefetch_for(unit_types![Mlp], unit_types![Block, Block])
        .with_backward_prefetch_for(unit_types![Block], unit_types![])
        .with_forward_prefetch_at("blocks.0", ["blocks.1"])
        .with_backward_prefetch_at("blocks.1", [""; 0])
        .with_mixed_precision_at(["blocks.0"], bf16)
        .with_gradient_divide_factor(1.0);
    // Unit types are known by name there, so the options differ, but what they do does not.
    let (found, expected) = (train(loaded.init::<Mlp>().unwrap()), train(expected));
    found.assert_same_bits(&expected, "a configuration");
    assert_eq!((found.all_gathers, found.buffers), (expected.all_gathers, expected.buffers));
    let misspelt = FsdpConfig::new().with_reshard_after_forward_for(vec![("Blok".into(), never)]);
    let error = misspelt.init::<Mlp>().unwrap_err().to_string();
    assert!(error.contains("reshard_after_forward_for") && error.contains("`Blok`"), "{error}");
}
