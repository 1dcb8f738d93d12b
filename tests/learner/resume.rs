//! A run that ends at any point and resumes has the numbers of one that did not.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::module::Module;
use burn::tensor::Device;
use fsdp_runtime::Error;
use fsdp_runtime::errors::{LaunchError, LearnerError};
use fsdp_runtime::prelude::*;
use fsdp_runtime::train::{RankLoader, supervised};
use tempfile::tempdir;

use super::model::{Batch, Row, Rows, rows};
use super::run::{BATCH, Metrics, Run, TRAIN, VALID, learner, sharded, strategy};
use super::support::compare::assert_same_bits;
use burn::train::metric::{AccuracyMetric, LossMetric};

/// A batcher that panics after a number of batches of all ranks.
struct Dies {
    left: Arc<AtomicUsize>,
}

impl Batcher<Row, Batch> for Dies {
    fn batch(&self, items: Vec<Row>, device: &Device) -> Batch {
        let left =
            self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
        assert!(left.is_ok(), "the machine is switched off");
        Rows.batch(items, device)
    }
}

/// A batcher that counts the batches of all ranks.
struct Counts {
    made: Arc<AtomicUsize>,
}

impl Batcher<Row, Batch> for Counts {
    fn batch(&self, items: Vec<Row>, device: &Device) -> Batch {
        self.made.fetch_add(1, Ordering::Relaxed);
        Rows.batch(items, device)
    }
}

/// Removes the training metrics of a run, so that the run that resumes it leaves only its own.
fn remove_train_metrics(folder: &Path) {
    std::fs::remove_dir_all(folder.join("train")).expect("the run has logged its metrics");
}

/// Runs until the ranks have made `batches` batches.
fn killed_after(batches: usize, run: &Run, folder: &Path) -> LaunchError {
    let left = Arc::new(AtomicUsize::new(batches));
    let (run, folder) = (run.clone(), folder.to_path_buf());
    let options = super::support::ranks::launch_options(run.world);
    let ranks = launch(options, move |worker| {
        let loader = |dataset| {
            let batcher = Dies { left: left.clone() };
            RankLoader::new(batcher, dataset, &worker).batch_size(BATCH / run.world).prefetch(0)
        };
        let train = loader(rows(0, TRAIN)).shuffle(run.shuffle.unwrap()).build();
        let valid = loader(rows(500, VALID)).build();
        supervised(&worker, &folder, train, valid)
            .metrics((LossMetric::new(), AccuracyMetric::new()))
            .num_epochs(run.epochs)
            .with_application_logger(None)
            .with_training_strategy(strategy(&run, &folder, &worker).into())
            .launch(learner(&run, &worker)?);
        Ok::<_, Error>(())
    });
    ranks.expect_err("the batcher panics")
}

#[test]
fn a_killed_run_resumes_to_the_same_bits() {
    let run = Run { epochs: 3, shuffle: Some(4), checkpoint_every: Some(2), ..Run::new(2) };
    let whole = tempdir().unwrap();
    let expected = sharded(&run, whole.path()).unwrap();
    let expected_losses = Metrics::read(whole.path(), run.epochs).train_losses;

    // In the first epoch, in the validation after it, and in the second epoch.
    for batches in [13, 20, 37] {
        let folder = tempdir().unwrap();
        let error = killed_after(batches, &run, folder.path());
        assert!(error.to_string().contains("the machine is switched off"), "{error}");
        remove_train_metrics(folder.path());
        let resumed = sharded(&run, folder.path()).unwrap();
        assert_eq!(resumed.len(), expected.len());
        for (found, expected) in resumed.iter().zip(&expected) {
            assert_same_bits(&found.head, &expected.head, format!("killed after {batches}"));
        }
        let losses = Metrics::read(folder.path(), run.epochs).train_losses;
        let all = expected_losses.len();
        assert!((5..all).contains(&losses.len()), "{} of {all} batches", losses.len());
        let tail = &losses[losses.len() - 5..];
        assert_same_bits(tail, &expected_losses[expected_losses.len() - 5..], "the last losses");
    }
}

/// A position within an epoch refers to a dataset and its order.
#[test]
fn another_order_of_the_data() {
    for world in [1, 2] {
        let folder = tempdir().unwrap();
        let run = Run { shuffle: Some(4), checkpoint_every: Some(2), ..Run::new(world) };
        killed_after(6 * world + 1, &run, folder.path());
        for (shuffle, found) in
            [(Some(5), "132 items shuffled with seed 5"), (None, "132 items in")]
        {
            let other = Run { shuffle, ..run.clone() };
            let error = sharded(&other, folder.path()).err().unwrap();
            let Some(Error::Learner(LearnerError::OtherData { epoch: 1, .. })) =
                error.source.downcast_ref::<Error>()
            else {
                panic!("{error}")
            };
            let saved = "with 132 items shuffled with seed 4, and the data loader now has ";
            assert!(error.to_string().contains(&format!("{saved}{found}")), "{error}");
        }
        sharded(&run, folder.path()).unwrap();
        // At the end of an epoch the order may change.
        sharded(&Run { epochs: 3, shuffle: Some(5), ..run }, folder.path()).unwrap();
    }
}

/// A run that continues in its first epoch with 32 rows would have no batch there.
#[test]
fn a_position_beyond_the_data() {
    for world in [1, 2] {
        let run = Run { shuffle: Some(4), checkpoint_every: Some(2), ..Run::new(world) };
        for burns in [false, true] {
            // A loader of Burn's would need a split of the data.
            if burns && world > 1 {
                continue;
            }
            let folder = tempdir().unwrap();
            killed_after(6 * world + 1, &run, folder.path());
            let (run, path) = (run.clone(), folder.path().to_path_buf());
            let options = super::support::ranks::launch_options(world);
            let resumed = launch(options, move |worker| {
                let own = |dataset| RankLoader::new(Rows, dataset, &worker).batch_size(8);
                let train = if burns {
                    DataLoaderBuilder::new(Rows).batch_size(8).build(rows(0, 32))
                } else {
                    own(rows(0, 32)).build()
                };
                supervised(&worker, &path, train, own(rows(500, VALID)).build())
                    .with_application_logger(None)
                    .with_training_strategy(strategy(&run, &path, &worker).into())
                    .launch(learner(&run, &worker)?);
                Ok::<_, Error>(())
            });
            let error = resumed.unwrap_err();
            let expected = if burns {
                LearnerError::PositionBeyondData { epoch: 1, position: 6 * BATCH, items: 32 }
            } else {
                let saved = "132 items shuffled with seed 4".into();
                let found = "32 items in the order of the dataset".into();
                LearnerError::OtherData { epoch: 1, saved, found }
            };
            let cause = error.source.downcast_ref::<Error>();
            assert_eq!(cause, Some(&Error::Learner(expected)), "{error}");
            assert!(error.to_string().contains("resume with the dataset"), "{error}");
        }
    }
}

#[test]
fn a_run_continues_with_another_number_of_ranks() {
    let run = |world, epochs| Run { epochs, checkpoint_every: Some(2), ..Run::new(world) };
    let (whole, folder) = (tempdir().unwrap(), tempdir().unwrap());
    let expected = sharded(&run(1, 2), whole.path()).unwrap();
    sharded(&run(4, 1), folder.path()).unwrap();
    remove_train_metrics(folder.path());
    let found = sharded(&run(2, 2), folder.path()).unwrap();
    let losses = Metrics::read(folder.path(), 2).train_losses;
    assert_eq!(losses.len(), TRAIN.div_ceil(BATCH), "the second epoch alone is trained");
    let within = super::support::compare::Within::Scaled(1e-5);
    super::support::compare::assert_close(&found[0].head, &expected[0].head, within, "weights");
}

#[test]
fn a_finished_run_has_nothing_left_to_do() {
    let run = Run { checkpoint_every: Some(3), ..Run::new(2) };
    let folder = tempdir().unwrap();
    let first = sharded(&run, folder.path()).unwrap();
    let losses = Metrics::read(folder.path(), run.epochs).train_losses;
    assert_eq!(losses.len(), run.epochs * TRAIN.div_ceil(BATCH));
    remove_train_metrics(folder.path());
    let again = sharded(&run, folder.path()).unwrap();
    assert_same_bits(&again[0].head, &first[0].head, "weights");
    assert!(Metrics::read(folder.path(), run.epochs).train_losses.is_empty());
}

/// A loader of Burn's takes no position. Its shuffling goes on where it was.
#[test]
fn a_run_with_burns_loader_resumes_in_its_order() {
    let train = |run: Run, folder: &Path| {
        let (folder, made) = (folder.to_path_buf(), Arc::new(AtomicUsize::new(0)));
        let batcher = Arc::clone(&made);
        let ranks = launch(super::support::ranks::launch_options(1), move |worker| {
            let loader = |dataset| DataLoaderBuilder::new(Rows).batch_size(BATCH).build(dataset);
            let batcher = Counts { made: Arc::clone(&batcher) };
            let shuffled = DataLoaderBuilder::new(batcher).batch_size(BATCH).shuffle(9);
            let training = supervised(
                &worker,
                &folder,
                shuffled.build(rows(0, TRAIN)),
                loader(rows(500, VALID)),
            )
            .num_epochs(run.epochs)
            .with_application_logger(None)
            .with_training_strategy(strategy(&run, &folder, &worker).into());
            let result = training.launch(learner(&run, &worker)?);
            Ok::<_, Error>(result.model.materialize().head_weights())
        });
        (ranks.unwrap().swap_remove(0), made.load(Ordering::Relaxed))
    };
    let run = |epochs| Run { epochs, checkpoint_every: Some(1000), ..Run::new(1) };
    let (whole, folder) = (tempdir().unwrap(), tempdir().unwrap());
    let (expected, all) = train(run(3), whole.path());
    let (_, first) = train(run(1), folder.path());
    let (found, rest) = train(run(3), folder.path());
    assert_same_bits(&found, &expected, "weights");
    assert!(first > 0 && rest < all, "{first} batches, then {rest}, in place of {all}");
}
