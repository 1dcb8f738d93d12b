//! What cannot be right on a sharded model is an error that names what to write in its place.

use std::path::Path;
use std::sync::Arc;

use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::grad_clipping::GradientClipping;
use burn::optim::{AdamWConfig, LambConfig};
use fsdp_runtime::errors::{LaunchError, LearnerError, ScheduleError};
use fsdp_runtime::prelude::*;
use fsdp_runtime::train::{FsdpStrategy, RankLoader};
use fsdp_runtime::{Error, WorldSize};
use tempfile::tempdir;

use super::model::{Batch, Row, Rows, rows};
use super::run::{
    BATCH, Metrics, Outcome, Run, TRAIN, learner, sharded, sharded_with, strategy, training,
};
use super::support::compare::assert_same_bits;
use super::support::ranks::launch_options;

/// Returns the error of a launch's first rank.
fn cause(error: &LaunchError) -> LearnerError {
    match error.source.downcast_ref::<Error>() {
        Some(Error::Learner(cause)) => cause.clone(),
        other => panic!("another error: {other:?} {error}"),
    }
}

fn assert_names(error: &LaunchError, expected: &LearnerError, cure: &str) {
    assert_eq!(&cause(error), expected);
    assert!(error.to_string().contains(cure), "{error}");
}

/// Trains on the batches of the loader that `train` makes.
fn trained_on(
    run: &Run,
    folder: &Path,
    change: fn(FsdpStrategy) -> FsdpStrategy,
    train: impl Fn(&Worker) -> Arc<dyn DataLoader<Batch>> + Send + Sync + 'static,
) -> Result<Vec<Outcome>, LaunchError> {
    let (run, path) = (run.clone(), folder.to_path_buf());
    launch(launch_options(run.world), move |worker| {
        let valid = RankLoader::new(Rows, rows(500, 8), &worker).batch_size(4).build();
        let training = fsdp_runtime::train::supervised(&worker, &path, train(&worker), valid)
            .with_application_logger(None)
            .num_epochs(run.epochs)
            .with_training_strategy(change(strategy(&run, &path, &worker)).into());
        Ok::<_, Error>(Outcome::new(training.launch(learner(&run, &worker)?)))
    })
}

/// Returns the builder of a rank's loader of 133 rows, which leave 3 and 2 for the last batches of
/// two ranks.
fn loader(worker: &Worker) -> RankLoader<Row, Batch> {
    RankLoader::new(Rows, rows(0, 133), worker).batch_size(8)
}

#[test]
fn batches_with_different_numbers_of_items() {
    let folder = tempdir().unwrap();
    let uneven = |worker: &Worker| loader(worker).equal_lengths(false).build();
    let error = trained_on(&Run::new(2), folder.path(), |it| it, uneven).err().unwrap();
    let LearnerError::UnevenBatchSizes { batch: 9, rank, items: 2, expected: 3 } = cause(&error)
    else {
        panic!("{error}")
    };
    assert_eq!(rank.index(), 1);
    assert!(error.to_string().contains("`equal_lengths(true)`"), "{error}");
    // With one rank, the last batch may be smaller.
    trained_on(&Run::new(1), folder.path(), |it| it, uneven).unwrap();
}

#[test]
fn training_pads_the_batches_by_default() {
    let head = |train: fn(&Worker) -> Arc<dyn DataLoader<Batch>>| {
        let folder = tempdir().unwrap();
        trained_on(&Run::new(2), folder.path(), |it| it, train).unwrap().swap_remove(0).head
    };
    let by_default = head(|worker| loader(worker).build());
    let equal = head(|worker| loader(worker).equal_lengths(true).build());
    assert_same_bits(&by_default, &equal, "weights");
    assert_ne!(by_default, head(|worker| loader(worker).drop_last(true).build()));
}

/// Returns the loader of Burn's for a rank's part of the data, which is `parts` of all.
fn burns_loader(worker: &Worker, parts: usize) -> Arc<dyn DataLoader<Batch>> {
    let len = TRAIN / parts;
    let first = if parts == 1 { 0 } else { worker.rank().index() * len };
    DataLoaderBuilder::new(Rows).batch_size(11).build(rows(first, len))
}

#[test]
fn a_loader_that_gives_each_rank_all_of_the_data() {
    let folder = tempdir().unwrap();
    let train = |world, change, parts| {
        let run = Run { epochs: 1, ..Run::new(world) };
        trained_on(&run, folder.path(), change, move |worker| burns_loader(worker, parts))
    };
    let error = train(2, |it| it, 1).err().unwrap();
    let expected = LearnerError::UnsplitData { world: WorldSize::new(2).unwrap() };
    assert_names(&error, &expected, "`RankLoader::new(batcher, dataset, &worker)");
    assert!(error.to_string().contains("with_own_data_split()"), "{error}");
    train(1, |it| it, 1).unwrap();

    let own_split = train(2, FsdpStrategy::with_own_data_split, 2).unwrap();
    assert_same_bits(&own_split[0].head, &own_split[1].head, "weights");
}

#[test]
fn a_learner_without_the_strategy() {
    let train = |world| {
        let folder = tempdir().unwrap();
        let (run, path) = (Run::new(world), folder.path().to_path_buf());
        launch(launch_options(world), move |worker| {
            let train = loader(&worker).build();
            let valid = RankLoader::new(Rows, rows(500, 8), &worker).build();
            let training = fsdp_runtime::train::supervised(&worker, &path, train, valid)
                .with_application_logger(None)
                .num_epochs(1);
            Ok::<_, Error>(Outcome::new(training.launch(learner(&run, &worker)?)))
        })
    };
    let expected = LearnerError::NoStrategy { world: WorldSize::new(2).unwrap() };
    assert_names(&train(2).err().unwrap(), &expected, "FsdpStrategy::new(&worker)");
    train(1).unwrap();
}

#[test]
fn burns_checkpointers() {
    for world in [1, 2] {
        let folder = tempdir().unwrap();
        let run = Run::new(world);
        let error = sharded_with(&run, folder.path(), |_, it| it.with_default_checkpointers());
        assert_names(&error.err().unwrap(), &LearnerError::BurnCheckpointer, ".with_checkpoints(");
        let error = sharded_with(&run, folder.path(), |_, it| it.checkpoint(3));
        let expected = LearnerError::BurnCheckpoint { epoch: 3 };
        assert_names(&error.err().unwrap(), &expected, "resume_latest()");
    }
}

#[test]
fn clipping_by_norm_in_the_optimizer() {
    let optimizer = || AdamWConfig::new().init().with_grad_clipping(GradientClipping::Norm(0.5));
    for world in [1, 2] {
        let folder = tempdir().unwrap();
        let run = Run { optimizer, ..Run::new(world) };
        let error = sharded(&run, folder.path()).err().unwrap();
        let expected = LearnerError::NormClipping { max_norm: "0.5".into() };
        assert_names(&error, &expected, "with_max_grad_norm(0.5)");
    }
    let by_value = || AdamWConfig::new().init().with_grad_clipping(GradientClipping::Value(0.5));
    let folder = tempdir().unwrap();
    sharded(&Run { optimizer: by_value, ..Run::new(2) }, folder.path()).unwrap();
}

#[test]
fn an_optimizer_of_full_matrices_that_gets_shards() {
    for world in [1, 2] {
        let folder = tempdir().unwrap();
        let run = Run { optimizer: || LambConfig::new().init(), ..Run::new(world) };
        let error = sharded(&run, folder.path()).err().unwrap();
        let cause = error.source.downcast_ref::<Error>();
        let refused = ScheduleError::OptimizerNeedsMatrix { path: "blocks.0.linear.weight".into() };
        assert_eq!(cause, Some(&Error::Schedule(refused)), "{error}");
        assert!(error.to_string().contains("WholeParam"), "{error}");
    }
}

#[test]
fn a_resumed_run_without_checkpoints() {
    let folder = tempdir().unwrap();
    let run = Run::new(2);
    let error = sharded_with(&run, folder.path(), |worker, training| {
        let strategy = FsdpStrategy::new(worker).with_resume_latest();
        training.with_training_strategy(strategy.into())
    });
    assert_names(&error.err().unwrap(), &LearnerError::NoCheckpoints, ".with_checkpoints(");
}

#[test]
fn ranks_with_different_numbers_of_batches() {
    let folder = tempdir().unwrap();
    let path = folder.path().to_path_buf();
    let run = Run::new(2);
    let ranks = launch(launch_options(2), move |worker| {
        // Rank 0 has one item more than rank 1, and with it one batch more.
        let own = |items| RankLoader::new(Rows, rows(0, items), &worker).batch_size(2);
        let train = own(9).equal_lengths(false).build();
        let training = fsdp_runtime::train::supervised(&worker, &path, train, own(4).build())
            .with_application_logger(None)
            .with_training_strategy(strategy(&run, &path, &worker).into());
        training.launch(learner(&run, &worker)?);
        Ok::<_, Error>(())
    });
    let error = ranks.err().unwrap();
    let LearnerError::UnevenBatches { batch: 3, with, without } = cause(&error) else {
        panic!("{error}")
    };
    let numbers =
        |ranks: Vec<fsdp_runtime::Rank>| ranks.iter().map(|rank| rank.index()).collect::<Vec<_>>();
    assert_eq!((numbers(with), numbers(without)), (vec![0], vec![1]));
    assert!(error.to_string().contains("`equal_lengths`"), "{error}");
}

#[test]
fn loaders_whose_items_depend_on_the_rank() {
    let split = |worker: &Worker| {
        let own = rows(40 * worker.rank().index(), 40 + worker.rank().index());
        RankLoader::new(Rows, own, worker).batch_size(8).build()
    };
    let seeded = |worker: &Worker| loader(worker).shuffle(worker.rank().index() as u64).build();
    let wrong: [(fn(&Worker) -> _, _); 2] = [(split, "41 items in"), (seeded, "seed 1")];
    for (train, found) in wrong {
        let folder = tempdir().unwrap();
        let error = trained_on(&Run::new(2), folder.path(), |it| it, train).err().unwrap();
        let LearnerError::DataMismatch { rank, .. } = cause(&error) else { panic!("{error}") };
        assert_eq!(rank.index(), 1);
        let text = error.to_string();
        assert!(text.contains(found) && text.contains("same seed to `RankLoader`"), "{text}");
    }
}

#[test]
fn a_dataset_with_fewer_items_than_ranks() {
    let ranks = launch(launch_options(4), |worker| {
        RankLoader::new(Rows, rows(0, 3), &worker).build();
        Ok::<_, Error>(())
    });
    let world = WorldSize::new(4).unwrap();
    let expected = LearnerError::TooFewItems { items: 3, world, needed: 4 };
    assert_names(&ranks.err().unwrap(), &expected, "at least 4 items");
}

#[test]
fn a_dataset_that_fails_on_one_rank_ends_all() {
    use burn::data::dataset::{Dataset, DatasetError};

    struct Broken;

    impl Dataset<super::model::Row> for Broken {
        fn get(&self, index: usize) -> Result<super::model::Row, DatasetError> {
            if index == 31 {
                return Err(DatasetError::new(std::io::Error::other("row 31 cannot be read")));
            }
            rows(0, 64).get(index)
        }

        fn len(&self) -> usize {
            64
        }
    }

    let folder = tempdir().unwrap();
    let path = folder.path().to_path_buf();
    let run = Run::new(2);
    let ranks = launch(launch_options(2), move |worker| {
        let train = RankLoader::new(Rows, Broken, &worker).batch_size(4).build();
        let valid = RankLoader::new(Rows, rows(0, 8), &worker).batch_size(4).build();
        let training = fsdp_runtime::train::supervised(&worker, &path, train, valid)
            .with_application_logger(None)
            .with_training_strategy(strategy(&run, &path, &worker).into());
        training.launch(learner(&run, &worker)?);
        Ok::<_, Error>(())
    });
    let error = ranks.err().unwrap();
    let LearnerError::Data { rank, reason } = cause(&error) else { panic!("{error}") };
    assert_eq!(rank.index(), 1);
    assert!(reason.contains("row 31"), "{reason}");
}

#[test]
fn the_training_of_this_file_runs_without_a_wrong_setting() {
    let folder = tempdir().unwrap();
    let (run, path) = (Run { epochs: 1, ..Run::new(2) }, folder.path().to_path_buf());
    let ranks = launch(launch_options(2), move |worker| {
        let training = training(&run, &path, &worker, rows(0, 32));
        Ok::<_, Error>(training.launch(learner(&run, &worker)?).error.is_none())
    });
    assert_eq!(ranks.unwrap(), [true, true]);
    assert_eq!(Metrics::read(folder.path(), 1).train_losses.len(), 32 / BATCH);
}
