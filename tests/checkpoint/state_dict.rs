//! State dicts in memory: sharded, local and full, of models and of optimizers.

use burn::optim::ModuleOptimizer;
use fsdp_runtime::Error;
use fsdp_runtime::errors::CheckpointError;
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::{FullState, OptimizerState};

use crate::support::checkpoint::{optimizer, schedule, sharded, train_step};
use crate::support::compare::assert_same_state;
use crate::support::{Net, of_rank_0, on_ranks};

/// Returns a model and its optimizer after two steps.
fn trained(worker: &Worker, options: FsdpOptions) -> Result<(Fsdp<Net>, ModuleOptimizer), Error> {
    let (mut net, mut own) = (sharded(worker, 0.0, options)?, optimizer());
    let mut rate = schedule();
    for step in 0..2 {
        train_step(worker, &mut net, &mut own, &mut rate, step)?;
    }
    Ok((net, own))
}

fn options(seed: u64) -> FsdpOptions {
    FsdpOptions::new().with_seed(seed)
}

#[test]
fn the_shards_of_all_ranks_make_up_the_full_state() {
    let ranks = on_ranks(3, |worker| {
        let (net, own) = trained(worker, options(1))?;
        let full = net.state().full(Recipient::All)?;
        let moments = net.state().full_optimizer(&own, Recipient::All)?;
        Ok((net.state().sharded(), full, net.state().sharded_optimizer(&own)?, moments))
    });
    let (_, full, _, moments) = &ranks[0];
    assert!(!full.is_empty());
    for (sharded, ..) in &ranks {
        assert!(sharded.keys().eq(full.keys()), "{:?}", full.keys());
    }
    for (path, data) in full {
        assert!(data.num_elements() > 0, "{path}");
        let mut elements = vec![f32::NAN; data.num_elements()];
        for (sharded, ..) in &ranks {
            let part = &sharded[path];
            assert_eq!(part.shape, data.shape().as_slice());
            let values: Vec<f32> = part.data.iter().collect();
            elements[part.range.clone()].copy_from_slice(&values);
        }
        assert_eq!(elements, data.iter::<f32>().collect::<Vec<_>>(), "{path}");

        let state = &moments.parameters[path];
        assert_eq!(state.tensors.len(), 2);
        let expected: Vec<f32> = state.tensors["momentum.moment_2"].iter().collect();
        assert_eq!(expected.len(), data.num_elements(), "{path}");
        let mut elements = vec![f32::NAN; expected.len()];
        for (_, _, sharded, _) in &ranks {
            let Some(part) = sharded.parameters.get(path) else { continue };
            let part = &part.tensors["momentum.moment_2"];
            let values: Vec<f32> = part.data.iter().collect();
            elements[part.range.clone()].copy_from_slice(&values);
        }
        assert_eq!(elements, expected, "{path}");
    }
}

#[test]
fn a_run_resumes_from_every_kind_of_state() {
    for kind in ["sharded", "local", "full", "full of rank 1"] {
        on_ranks(2, move |worker| {
            let (mut net, mut own) = trained(worker, options(1))?;
            let mut again = sharded(worker, 0.0, options(2))?;
            let mut fresh = optimizer();
            match kind {
                "sharded" => {
                    again.state_mut().load_sharded(&net.state().sharded())?;
                    let state = net.state().sharded_optimizer(&own)?;
                    again.state().load_sharded_optimizer(&mut fresh, &state)?;
                }
                "local" => {
                    again.state_mut().load_local(&net.state().local())?;
                    let state = net.state().local_optimizer(&own)?;
                    again.state().load_local_optimizer(&mut fresh, &state)?;
                }
                _ => {
                    let one = worker.world().ranks().nth(1).unwrap();
                    let who = if kind == "full" { Recipient::All } else { Recipient::Only(one) };
                    let state = net.state().full(who)?;
                    assert_eq!(state.is_empty(), kind != "full" && worker.rank() != one);
                    again.state_mut().load_full(&state, who)?;
                    let state = net.state().full_optimizer(&own, Recipient::All)?;
                    again.state().load_full_optimizer(&mut fresh, &state)?;
                }
            }
            let (mut rate, mut other) = (schedule(), schedule());
            for step in 2..5 {
                let expected = train_step(worker, &mut net, &mut own, &mut rate, step)?;
                let found = train_step(worker, &mut again, &mut fresh, &mut other, step)?;
                assert_eq!(found.to_bits(), expected.to_bits(), "{kind}, step {step}");
            }
            Ok(())
        });
    }
}

#[test]
fn a_full_state_loads_at_another_world_and_strategy() {
    let (full, moments) = of_rank_0(3, |worker| {
        let (net, own) = trained(worker, options(1))?;
        let moments =
            net.state().full_optimizer(&own, Recipient::Only(fsdp_runtime::Rank::ZERO))?;
        Ok((net.state().full(Recipient::Only(fsdp_runtime::Rank::ZERO))?, moments))
    });
    assert!(!full.is_empty() && !moments.parameters.is_empty());
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
        let (full, moments) = (full.clone(), moments.clone());
        on_ranks(2, move |worker| {
            let mut net = sharded(worker, 0.0, options(2).with_strategy(strategy))?;
            let mut own = optimizer();
            net.state_mut().load_full(&full, Recipient::All)?;
            net.state().load_full_optimizer(&mut own, &moments)?;
            assert_same_state(&net.state().full(Recipient::All)?, &full, strategy);
            assert_eq!(net.state().full_optimizer(&own, Recipient::All)?, moments);
            Ok(())
        });
    }
}

#[test]
fn a_state_of_another_layout_is_refused_with_every_difference() {
    let other = on_ranks(3, |worker| {
        let (net, own) = trained(worker, options(1))?;
        let optimizer = (net.state().sharded_optimizer(&own)?, net.state().local_optimizer(&own)?);
        Ok((net.state().sharded(), net.state().local(), optimizer))
    });
    on_ranks(2, move |worker| {
        let mut net = sharded(worker, 0.0, options(2))?;
        let before = net.state().full(Recipient::All)?;
        let mut own = optimizer();
        let (sharded, local, (moments, local_moments)) = &other[worker.rank().index()];
        let refused = |outcome: Result<(), CheckpointError>, least: usize| {
            let Err(CheckpointError::StateMismatch { differences }) = outcome else {
                panic!("{outcome:?}")
            };
            assert!(differences.len() >= least, "{differences:?}");
        };
        refused(net.state_mut().load_sharded(sharded), 2);
        refused(net.state_mut().load_local(local), 2);
        refused(net.state().load_sharded_optimizer(&mut own, moments), 2);
        refused(net.state().load_local_optimizer(&mut own, local_moments), 2);

        let mut full = before.clone().into_iter().collect::<Vec<_>>();
        full[0].0.push('x');
        let full: FullState = full.into_iter().collect();
        let error = net.state_mut().load_full(&full, Recipient::All).unwrap_err();
        let Error::Checkpoint(CheckpointError::StateMismatch { differences }) = error else {
            panic!("{error}")
        };
        assert_eq!(differences.len(), 2, "one missing, one unexpected");
        let mut unknown = OptimizerState::default();
        let state = net.state().full_optimizer(&own, Recipient::All)?;
        assert!(state.parameters.is_empty(), "the optimizer is unchanged");
        unknown.parameters.insert(
            "nowhere".into(),
            fsdp_runtime::state::ParameterState {
                scalars: Default::default(),
                tensors: Default::default(),
            },
        );
        refused(net.state().load_full_optimizer(&mut own, &unknown), 1);
        assert_same_state(&net.state().full(Recipient::All)?, &before, "after failed loads");
        Ok(())
    });
}
