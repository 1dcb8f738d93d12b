//! State dicts in memory with options: of selected parameters, and loaded without strictness.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::nn::LinearConfig;
use burn::optim::ModuleOptimizer;
use burn::tensor::TensorData;
use fsdp_runtime::errors::{CheckpointError, CollectiveError, ScheduleError};
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::{FullState, ParamFilter, StateDictOptions};
use fsdp_runtime::{Error, Rank};

use super::filters::assert_loaded;
use super::ignored::{PATH, ignoring, own};
use super::initialisation::Counted;
use super::pretrained::tied;
use crate::support::checkpoint::optimizer;
use crate::support::compare::{assert_same_state, assert_state_differs};
use crate::support::transformer::Numbered;
use crate::support::{Net, batch, loss, on_ranks};

/// Returns a model whose embeddings, and one matrix of each block, are frozen. The frozen weights
/// are the same for every `start`, the others differ.
fn net(start: u64, blocks: usize, worker: &Worker) -> Net {
    let new = |start| Net::new(blocks, 0.0, worker.device()).map(&mut Numbered(start));
    let (base, mut net) = (new(0), new(start));
    net.embed = base.embed.freeze();
    for (block, base) in net.blocks.iter_mut().zip(base.blocks) {
        block.up.weight = base.up.weight.set_require_grad(false);
    }
    net
}

fn is_frozen(path: &str) -> bool {
    path.starts_with("embed.") || path.ends_with(".up.weight")
}

fn sharded(start: u64, worker: &Worker) -> Result<Fsdp<Net>, Error> {
    fully_shard(net(start, 2, worker), worker, FsdpOptions::new().with_seed(1))
}

fn with(filter: ParamFilter) -> StateDictOptions {
    StateDictOptions::new().with_filter(filter)
}

fn trained_only() -> StateDictOptions {
    with(ParamFilter::new().with_trainable_only())
}

fn lenient() -> StateDictOptions {
    StateDictOptions::new().with_strict(false)
}

/// Takes one step, on the same rows on all ranks.
fn step(
    worker: &Worker,
    net: Fsdp<Net>,
    optimizer: &mut ModuleOptimizer,
    at: usize,
) -> Result<Fsdp<Net>, Error> {
    let (tokens, labels) = batch(at, 0..4, worker.device());
    let gradients = net.backward(loss(net.forward(tokens), labels))?;
    Ok(optimizer.step(1e-2, net, gradients))
}

/// Returns a state whose `head.bias` is called `extra.bias`.
fn renamed(state: &FullState) -> FullState {
    let mut tensors: BTreeMap<String, TensorData> = state.clone().into_iter().collect();
    let bias = tensors.remove("head.bias").expect("a bias");
    tensors.insert("extra.bias".into(), bias);
    tensors.into_iter().collect()
}

/// Returns the differences of a state that does not fit.
#[track_caller]
fn differences(error: Error) -> Vec<String> {
    match error {
        Error::Checkpoint(CheckpointError::StateMismatch { differences }) => differences,
        other => panic!("{other}"),
    }
}

#[test]
fn a_state_of_the_trained_parameters_completes_a_model_of_the_same_base() {
    for world in [1, 2, 3] {
        on_ranks(world, |worker| {
            let net = step(worker, sharded(0, worker)?, &mut optimizer(), 0)?;
            let full = net.state().full(Recipient::All)?;
            let state = net.state().full_with(Recipient::All, &trained_only())?;
            for (path, data) in &full {
                let expected = (!is_frozen(path)).then_some(data);
                assert!(state.get(path) == expected, "{path}");
            }
            assert!(!state.is_empty() && state.len() < full.len());

            let mut other = sharded(5, worker)?;
            assert_state_differs(&other.state().full(Recipient::All)?, &full, "another start");
            let refused = other.state_mut().load_full(&state, Recipient::All).unwrap_err();
            assert_eq!(differences(refused).len(), full.len() - state.len());
            let loaded = other.state_mut().load_full_with(&state, Recipient::All, &trained_only());
            let report = loaded?;
            assert_eq!(report.loaded, state.len());
            assert!(report.missing.is_empty() && report.unexpected.is_empty());
            assert_same_state(&other.state().full(Recipient::All)?, &full, "loaded");
            Ok(())
        });
    }
}

#[test]
fn a_submodule_is_loaded_and_everything_else_keeps_its_bits() {
    for (world, who) in [
        (1, Recipient::All),
        (3, Recipient::All),
        (1, Recipient::Only(Rank::ZERO)),
        (3, Recipient::Only(Rank::ZERO)),
    ] {
        on_ranks(world, move |worker| {
            let (net, mut other) = (sharded(0, worker)?, sharded(5, worker)?);
            let filter =
                ParamFilter::new().with_submodule("blocks").without_submodule("blocks.0.down");
            let before = other.state().full(Recipient::All)?;
            let full = net.state().full(Recipient::All)?;
            // The state has more than is loaded.
            let state = net.state().full(who)?;
            let report = other.state_mut().load_full_with(&state, who, &with(filter))?;
            let after = other.state().full(Recipient::All)?;
            assert_loaded(&after, &before, &full, |path| {
                path.starts_with("blocks.") && !path.starts_with("blocks.0.down.")
            });
            assert_eq!(report.loaded + report.filtered.len(), full.len());
            assert!(report.filtered.contains(&"blocks.0.down.weight".to_string()), "{report:?}");
            assert!(report.filtered.contains(&"head.weight".to_string()), "{report:?}");
            Ok(())
        });
    }
}

#[test]
fn missing_and_unexpected_keys_are_errors_or_in_the_report() {
    for (world, who) in [
        (1, Recipient::All),
        (2, Recipient::All),
        (1, Recipient::Only(Rank::ZERO)),
        (2, Recipient::Only(Rank::ZERO)),
    ] {
        on_ranks(world, move |worker| {
            let (net, mut other) = (sharded(0, worker)?, sharded(5, worker)?);
            let full = net.state().full(Recipient::All)?;
            let before = other.state().full(Recipient::All)?;
            let provides = who == Recipient::All || worker.is_rank_zero();
            let state = if provides { renamed(&full) } else { FullState::default() };

            let strict = StateDictOptions::default();
            let error = other.state_mut().load_full_with(&state, who, &strict).unwrap_err();
            if provides {
                let expected = ["missing: `head.bias`", "unexpected: `extra.bias`"];
                assert_eq!(differences(error), expected);
            } else {
                let told = matches!(error, Error::Collective(CollectiveError::PeerFailed { .. }));
                assert!(told, "{error}");
            }
            let after = other.state().full(Recipient::All)?;
            assert_same_state(&after, &before, "after a refused load");

            let report = other.state_mut().load_full_with(&state, who, &lenient())?;
            assert_eq!(report.missing, ["head.bias"]);
            assert_eq!(report.unexpected, ["extra.bias"]);
            assert_eq!((report.loaded, report.filtered.len()), (full.len() - 1, 0));
            let after = other.state().full(Recipient::All)?;
            assert_loaded(&after, &before, &full, |path| path != "head.bias");
            Ok(())
        });
    }
}

#[test]
fn another_shape_is_an_error_without_strictness_too() {
    on_ranks(2, |worker| {
        let mut net = sharded(0, worker)?;
        let full = net.state().full(Recipient::All)?;
        let mut tensors: BTreeMap<String, TensorData> = full.clone().into_iter().collect();
        tensors.insert("head.bias".into(), TensorData::new(vec![0f32; 2], [2]));
        let state: FullState = tensors.into_iter().collect();
        let refused = net.state_mut().load_full_with(&state, Recipient::All, &lenient());
        let found = differences(refused.unwrap_err());
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("`head.bias`: shape [2] in the state"), "{found:?}");
        // A filter that leaves the parameter out does not look at it.
        let blocks = with(ParamFilter::new().with_submodule("blocks"));
        net.state_mut().load_full_with(&state, Recipient::All, &blocks)?;
        assert_same_state(&net.state().full(Recipient::All)?, &full, "the same blocks");
        Ok(())
    });
}

#[test]
fn a_sharded_state_of_another_number_of_blocks_is_an_error_or_loads_what_fits() {
    for world in [1, 2] {
        on_ranks(world, |worker| {
            let model = |start, blocks| {
                fully_shard(net(start, blocks, worker), worker, FsdpOptions::new().with_seed(1))
            };
            let is_third = |path: &String| path.starts_with("blocks.2.");
            for (saved, loading) in [(2, 3), (3, 2)] {
                let (net, mut other) = (model(0, saved)?, model(5, loading)?);
                let (state, full) = (net.state().sharded(), net.state().full(Recipient::All)?);
                let before = other.state().full(Recipient::All)?;
                let strict = StateDictOptions::new();
                let error = other.state_mut().load_sharded_with(&state, &strict).unwrap_err();
                let kind = if loading == 3 { "missing" } else { "unexpected" };
                let found = differences(error);
                let expected = format!("{kind}: `blocks.2.");
                assert!(!found.is_empty());
                assert!(found.iter().all(|text| text.starts_with(&expected)), "{found:?}");

                let report = other.state_mut().load_sharded_with(&state, &lenient())?;
                let (listed, none) = match loading {
                    3 => (&report.missing, &report.unexpected),
                    _ => (&report.unexpected, &report.missing),
                };
                assert_eq!((listed.len(), none.len()), (found.len(), 0));
                assert!(listed.iter().all(is_third), "{listed:?}");
                let after = other.state().full(Recipient::All)?;
                assert_eq!(report.loaded, after.keys().filter(|path| !is_third(path)).count());
                for (path, data) in &after {
                    let from = if is_third(path) { &before } else { &full };
                    assert!(*data == from[path], "{path}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn a_filter_that_does_not_fit_is_an_error_on_every_rank() {
    on_ranks(2, |worker| {
        let (mut net, mut adamw) = (sharded(0, worker)?, optimizer());
        let state = net.state().full(Recipient::All)?;
        for (filter, expected) in [
            (
                ParamFilter::new().with_submodule("block.0"),
                "a submodule `block.0`; the nearest paths are `blocks.0`, ",
            ),
            (ParamFilter::new().with_adapters_only(), "it selects no parameter of the model; of "),
        ] {
            let options = with(filter);
            let refused = |error: Error| {
                let filter = matches!(&error, Error::Checkpoint(CheckpointError::Filter { .. }));
                assert!(filter && error.to_string().contains(expected), "{error}");
            };
            refused(net.state().full_with(Recipient::All, &options).unwrap_err());
            refused(net.state().sharded_with(&options).unwrap_err());
            refused(net.state().sharded_optimizer_with(&adamw, &options).unwrap_err());
            let loaded = net.state_mut().load_full_with(&state, Recipient::All, &options);
            refused(loaded.unwrap_err());
            let shards = net.state().sharded();
            refused(net.state_mut().load_sharded_with(&shards, &options).unwrap_err());
            let moments = net.state().sharded_optimizer(&adamw)?;
            let loaded = net.state().load_sharded_optimizer_with(&mut adamw, &moments, &options);
            refused(loaded.unwrap_err());
        }
        assert_same_state(&net.state().full(Recipient::All)?, &state, "after refused loads");
        Ok(())
    });
}

#[test]
fn ranks_with_other_options_or_states_get_an_error_and_do_not_wait() {
    on_ranks(2, |worker| {
        let mut net = sharded(0, worker)?;
        let state = net.state().full(Recipient::All)?;
        let own = if worker.is_rank_zero() { "head" } else { "blocks" };
        let options = with(ParamFilter::new().with_submodule(own));
        let error = net.state().full_with(Recipient::All, &options).unwrap_err();
        let differ = matches!(&error, Error::Checkpoint(CheckpointError::RanksDiffer { .. }));
        assert!(differ, "{error}");
        let options = StateDictOptions::new().with_strict(worker.is_rank_zero());
        let error = net.state_mut().load_full_with(&state, Recipient::All, &options).unwrap_err();
        let differ = matches!(&error, Error::Checkpoint(CheckpointError::RanksDiffer { .. }));
        assert!(differ, "{error}");

        // A parameter that one rank would load and another would not.
        let own = if worker.is_rank_zero() { state.clone() } else { renamed(&state) };
        let loaded = net.state_mut().load_full_with(&own, Recipient::All, &lenient());
        assert_eq!(
            differences(loaded.unwrap_err()),
            ["`head.bias`: in the state of rank 0, missing in that of rank 1"]
        );
        assert_same_state(&net.state().full(Recipient::All)?, &state, "after refused loads");
        Ok(())
    });
}

#[test]
fn a_filtered_sharded_state_restores_its_parameters_and_their_optimizer_state_only() {
    for world in [1, 2, 3] {
        on_ranks(world, |worker| {
            let (mut adamw, mut own) = (optimizer(), optimizer());
            let net = step(worker, sharded(0, worker)?, &mut adamw, 0)?;
            let net = step(worker, net, &mut adamw, 1)?;
            let mut other = step(worker, sharded(5, worker)?, &mut own, 0)?;
            let blocks = with(ParamFilter::new().with_submodule("blocks"));
            let inside = |path: &str| path.starts_with("blocks.");

            let state = net.state().sharded_with(&blocks)?;
            let moments = net.state().sharded_optimizer_with(&adamw, &blocks)?;
            assert!(!state.is_empty() && state.keys().all(|path| inside(path)));
            assert!(moments.parameters.keys().all(|path| inside(path)));
            let full = net.state().full(Recipient::All)?;
            let full_moments = net.state().full_optimizer(&adamw, Recipient::All)?;
            let before = other.state().full(Recipient::All)?;
            let own_moments = other.state().full_optimizer(&own, Recipient::All)?;

            let report = other.state_mut().load_sharded_with(&state, &blocks)?;
            assert_eq!(report.loaded, state.len());
            assert_loaded(&other.state().full(Recipient::All)?, &before, &full, inside);
            let report = other.state().load_sharded_optimizer_with(&mut own, &moments, &blocks)?;
            let after = other.state().full_optimizer(&own, Recipient::All)?;
            assert!(after.parameters.keys().eq(full_moments.parameters.keys()));
            let mut counts = [0, 0];
            for (path, found) in &after.parameters {
                counts[usize::from(inside(path))] += 1;
                let [theirs, mine] = [&full_moments, &own_moments].map(|it| &it.parameters[path]);
                assert!(theirs != mine, "{path}: the states differ");
                assert!(found == if inside(path) { theirs } else { mine }, "{path}");
            }
            assert!(counts.iter().all(|&count| count > 0), "{counts:?}");
            assert_eq!((report.loaded, report.missing.len()), (counts[1], 0));

            // The full form, which a fresh optimizer loads.
            let part = net.state().full_optimizer_with(&adamw, Recipient::All, &blocks)?;
            assert_eq!(part.parameters.len(), counts[1]);
            let mut fresh = optimizer();
            other.state().load_full_optimizer_with(&mut fresh, &part, &blocks)?;
            assert_eq!(other.state().full_optimizer(&fresh, Recipient::All)?, part);
            Ok(())
        });
    }
}

#[test]
fn an_optimizer_keeps_its_state_of_missing_parameters_without_strictness() {
    on_ranks(2, |worker| {
        let (mut adamw, mut own) = (optimizer(), optimizer());
        let net = step(worker, sharded(0, worker)?, &mut adamw, 0)?;
        let other = step(worker, sharded(5, worker)?, &mut own, 0)?;
        let mut state = net.state().full_optimizer(&adamw, Recipient::All)?;
        let bias = state.parameters.remove("head.bias").expect("state of the bias");
        state.parameters.insert("extra.bias".into(), bias);
        let before = other.state().full_optimizer(&own, Recipient::All)?;

        let strict = StateDictOptions::new();
        let refused = other.state().load_full_optimizer_with(&mut own, &state, &strict);
        assert_eq!(differences(refused.unwrap_err()), ["unexpected: `extra.bias`"]);
        assert_eq!(other.state().full_optimizer(&own, Recipient::All)?, before);
        let report = other.state().load_full_optimizer_with(&mut own, &state, &lenient())?;
        assert_eq!(report.missing, ["head.bias"]);
        assert_eq!(report.unexpected, ["extra.bias"]);
        let after = other.state().full_optimizer(&own, Recipient::All)?;
        assert_eq!(report.loaded, after.parameters.len() - 1);
        for (path, found) in &after.parameters {
            let from = if path == "head.bias" { &before } else { &state };
            assert!(*found == from.parameters[path], "{path}");
        }
        Ok(())
    });
}

#[test]
fn frozen_codes_are_left_out_and_keep_their_bits() {
    for storage in [StorageType::Bf16, StorageType::INT8, StorageType::NF4] {
        on_ranks(2, move |worker| {
            let policy = StoragePolicy::new().with_frozen(storage);
            let options = FsdpOptions::new().with_storage(policy).with_seed(1);
            let model = |start| fully_shard(net(start, 2, worker), worker, options.clone());
            let (net, mut other) = (model(0)?, model(5)?);
            let (expected, before) = (net.state().local(), other.state().local());
            // Codes whose scales are quantised do not load from shards, but are left out here.
            let state = net.state().sharded_with(&trained_only())?;
            let report = other.state_mut().load_sharded_with(&state, &trained_only())?;
            assert_eq!(report.loaded, state.len());
            let after = other.state().local();
            for (path, data) in after.tensors() {
                let from = if is_frozen(path) { &before } else { &expected };
                let from = &from.tensors()[path];
                assert!(data.as_bytes() == from.as_bytes(), "{storage}: {path}");
            }
            // The codes alone, from full tensors.
            let codes = with(ParamFilter::new().with_submodule("embed"));
            let state = net.state().full_with(Recipient::All, &codes)?;
            let report = other.state_mut().load_full_with(&state, Recipient::All, &codes)?;
            assert_eq!((report.loaded, report.missing.len()), (state.len(), 0));
            Ok(())
        });
    }
}

#[test]
fn tied_parameters_go_by_their_owner_and_running_statistics_are_not_frozen() {
    on_ranks(2, |worker| {
        let model =
            |seed| fully_shard(tied(worker.device()), worker, FsdpOptions::new().with_seed(seed));
        let (net, mut other) = (model(1)?, model(2)?);
        let embed = with(ParamFilter::new().with_submodule("embed"));
        let state = net.state().full_with(Recipient::All, &embed)?;
        assert_eq!(state.keys().collect::<Vec<_>>(), ["embed.weight"]);
        let before = other.state().full(Recipient::All)?;
        assert!(before["embed.weight"] != state["embed.weight"]);
        other.state_mut().load_full_with(&state, Recipient::All, &embed)?;
        let after = other.state().full(Recipient::All)?;
        assert_loaded(&after, &before, &state, |path| path == "embed.weight");

        let out = with(ParamFilter::new().with_submodule("out"));
        let error = net.state().full_with(Recipient::All, &out).unwrap_err().to_string();
        assert!(error.contains("`out.weight` is tied to `embed.weight`"), "{error}");
        let trained = net.state().full_with(Recipient::All, &trained_only())?;
        assert!(trained.contains_key("norm.running_mean"));
        assert_same_state(&trained, &net.state().full(Recipient::All)?, "nothing is frozen");
        Ok(())
    });
}

#[test]
fn ignored_parameters_are_selected_by_their_paths() {
    on_ranks(2, |worker| {
        let net = ignoring(worker, 7, worker.rank().index() as f32)?;
        let up = with(ParamFilter::new().with_submodule("blocks.0.up"));
        let state = net.state().full_with(Recipient::All, &up)?;
        assert_eq!(state.keys().collect::<Vec<_>>(), ["blocks.0.up.bias", PATH]);
        let mut other = ignoring(worker, 99, 9.0)?;
        let before = own(&other);
        assert_ne!(before.as_bytes(), own(&net).as_bytes());
        let rest = with(ParamFilter::new().without_submodule("blocks.0.up"));
        let full = net.state().full(Recipient::All)?;
        other.state_mut().load_full_with(&full, Recipient::All, &rest)?;
        assert_eq!(own(&other).as_bytes(), before.as_bytes(), "left out");
        other.state_mut().load_sharded_with(&net.state().sharded_with(&up)?, &up)?;
        assert_eq!(own(&other).as_bytes(), own(&net).as_bytes(), "the rank's own values");
        Ok(())
    });
}

/// A rank without elements of a parameter must not take the parameter as loaded: it would wait in
/// an all-gather in which the others do not take part.
#[test]
fn a_parameter_that_is_left_out_of_a_deferred_model_has_no_values_on_any_rank() {
    let has_empty = on_ranks(2, |worker| {
        let linear = || LinearConfig::new(16, 24).init(worker.device());
        let model =
            |options| fully_shard(Counted { body: linear(), head: linear() }, worker, options);
        let whole = model(FsdpOptions::new().with_seed(1))?;
        let (full, shards) = (whole.state().full(Recipient::All)?, whole.state().sharded());
        for (first, second) in [("body", "head"), ("head", "body")] {
            let mut net = model(FsdpOptions::new().with_deferred_init(true))?;
            let [first, second] =
                [first, second].map(|path| with(ParamFilter::new().with_submodule(path)));
            let report = net.state_mut().load_sharded_with(&shards, &first)?;
            assert_eq!(report.loaded, 2);
            let error = net.state().full(Recipient::All).unwrap_err();
            let not_loaded = matches!(&error, Error::Schedule(ScheduleError::NotLoaded { .. }));
            assert!(not_loaded, "{error}");
            let part = net.state().full_with(Recipient::All, &first)?;
            assert_eq!(part.len(), 2);
            net.state_mut().load_full_with(&full, Recipient::All, &second)?;
            assert_same_state(&net.state().full(Recipient::All)?, &full, "both parts");
        }
        Ok(shards.values().any(|shard| shard.range.is_empty()))
    });
    assert!(has_empty.contains(&true), "no rank has an empty shard");
}
