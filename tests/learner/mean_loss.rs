//! The mean over counted rows, of which ranks and micro-batches have different numbers.

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::optim::SgdConfig;
use burn::train::{InferenceStep, TrainStep};
use fsdp_runtime::errors::ScheduleError;
use fsdp_runtime::prelude::*;
use tempfile::tempdir;

use super::model::{Net, Rows, rows};
use super::run::{BATCH, Metrics, Run, plain, sharded};
use super::support::compare::{Within, assert_close};
use super::support::ranks::launch_options;

const CLOSE: Within = Within::Scaled(1e-5);

fn run(world: usize) -> Run {
    Run { sums: true, optimizer: || SgdConfig::new().init(), ..Run::new(world) }
}

#[test]
fn losses_and_weights_are_those_of_burns_learner_on_the_whole_batches() {
    for world in [1, 2, 4] {
        let (single, ranks) = (tempdir().unwrap(), tempdir().unwrap());
        let expected = plain(&run(world), single.path());
        let outcomes = sharded(&run(world), ranks.path()).unwrap();
        let losses = |folder| Metrics::read(folder, 2).train_losses;
        assert_close(&losses(ranks.path()), &losses(single.path()), CLOSE, "training losses");
        for outcome in outcomes {
            assert_close(&outcome.head, &expected, CLOSE, "weights");
        }
    }
}

#[test]
fn accumulated_batches_have_the_gradients_of_one_batch() {
    let folder = tempdir().unwrap();
    let expected = sharded(&run(1), folder.path()).unwrap().swap_remove(0).head;
    for world in [1, 2, 4] {
        let halves = Run { batch: BATCH / 2, accumulation: Some(2), ..run(world) };
        let folder = tempdir().unwrap();
        for outcome in sharded(&halves, folder.path()).unwrap() {
            assert_close(&outcome.head, &expected, CLOSE, format!("{world} ranks"));
        }
    }
}

/// Both begin a step with one kind of loss and go on with the other.
#[test]
fn means_and_sums_in_one_step_are_an_error() {
    for sums in [true, false] {
        let error = launch(launch_options(2), move |worker| {
            let net = Net::new(worker.device()).with_sums(sums);
            let model = fully_shard(net, &worker, FsdpOptions::new())?;
            let items = || rows(0, 4).iter().collect::<Result<_, _>>().expect("rows in memory");
            let batch = || Rows.batch(items(), worker.device());
            let loss = InferenceStep::step(&model, batch()).loss;
            if sums {
                model.accumulate(loss)?
            } else {
                model.accumulate_sum(loss, 4.0)?
            }
            let _output = TrainStep::step(&model, batch());
            Ok::<_, Error>(())
        });
        let error = error.unwrap_err();
        let cause = error.source.downcast_ref::<Error>();
        let expected = Error::Schedule(ScheduleError::MixedLosses { sum: sums });
        assert_eq!(cause, Some(&expected), "{error}");
    }
}
