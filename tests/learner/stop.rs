//! One decision for all ranks when to stop.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use burn::data::dataloader::batcher::Batcher;
use burn::tensor::Device;
use burn::train::metric::store::{Aggregate, Direction, Split};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{Interrupter, MetricEarlyStoppingStrategy, StoppingCondition};
use fsdp_runtime::Error;
use fsdp_runtime::prelude::*;
use fsdp_runtime::train::{RankLoader, supervised};
use tempfile::tempdir;

use super::model::{Batch, Row, Rows, rows};
use super::run::{
    BATCH, Metrics, Outcome, Run, TRAIN, VALID, learner, sharded, sharded_with, strategy,
};
use super::support::compare::assert_same_bits;
use super::support::ranks::launch_options;

#[test]
fn an_interrupter_of_any_rank_stops_all() {
    for rank in 0..2 {
        let folder = tempdir().unwrap();
        let outcomes = sharded_with(&Run::new(2), folder.path(), move |worker, training| {
            if worker.rank().index() == rank {
                training.interrupter().stop(Some("the operator said so"));
            }
            training
        });
        let outcomes = outcomes.unwrap();
        assert_eq!(outcomes.len(), 2);
        for outcome in outcomes {
            assert_eq!(outcome.interrupted.as_deref(), Some("the operator said so"), "rank {rank}");
        }
        assert!(Metrics::read(folder.path(), 2).train_losses.is_empty());
    }
}

#[test]
fn rank_0_stops_all_ranks_early() {
    let run = Run { epochs: 9, ..Run::new(2) };
    let folder = tempdir().unwrap();
    let stopped = sharded_with(&run, folder.path(), |_, training| {
        // The loss falls, so that the highest is the first epoch's.
        training.early_stopping(MetricEarlyStoppingStrategy::new(
            &LossMetric::new(),
            Aggregate::Mean,
            Direction::Highest,
            Split::Train,
            StoppingCondition::NoImprovementSince { n_epochs: 1 },
        ))
    });
    let stopped = stopped.unwrap();
    let losses = Metrics::read(folder.path(), 9).train_losses;
    assert!((18..81).contains(&losses.len()) && losses.len().is_multiple_of(9), "{}", losses.len());
    // As many epochs without early stopping.
    let other = tempdir().unwrap();
    let expected = sharded(&Run { epochs: losses.len() / 9, ..run }, other.path()).unwrap();
    assert_same_bits(&stopped[1].head, &expected[1].head, "weights of rank 1");
}

/// A batcher that stops the run when it has made a number of batches.
struct Stops {
    left: AtomicUsize,
    interrupter: Arc<OnceLock<Interrupter>>,
}

impl Batcher<Row, Batch> for Stops {
    fn batch(&self, items: Vec<Row>, device: &Device) -> Batch {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.interrupter.get().expect("the run has begun").stop(None);
        }
        Rows.batch(items, device)
    }
}

/// Trains until rank 0 has made five batches of the first epoch.
fn stopped_in_an_epoch(run: &Run, folder: &Path) {
    let (run, folder) = (run.clone(), folder.to_path_buf());
    let ranks = launch(launch_options(run.world), move |worker| {
        let interrupter = Arc::new(OnceLock::new());
        let left = if worker.is_rank_zero() { 5 } else { usize::MAX };
        let batcher = Stops { left: AtomicUsize::new(left), interrupter: interrupter.clone() };
        let train = RankLoader::new(batcher, rows(0, TRAIN), &worker).equal_lengths(true);
        let train = train.batch_size(BATCH / run.world).prefetch(0).build();
        let valid = RankLoader::new(Rows, rows(500, VALID), &worker);
        let valid = valid.batch_size(BATCH / run.world).build();
        let training = supervised(&worker, &folder, train, valid)
            .metrics((LossMetric::new(), AccuracyMetric::new()))
            .num_epochs(run.epochs)
            .with_application_logger(None)
            .with_training_strategy(strategy(&run, &folder, &worker).into());
        let _ = interrupter.set(training.interrupter());
        Ok::<_, Error>(Outcome::new(training.launch(learner(&run, &worker)?)))
    });
    assert!(ranks.unwrap().iter().all(|rank| rank.interrupted.is_some()));
}

#[test]
fn a_stopped_run_saves_a_checkpoint_to_resume_from() {
    let run = Run { checkpoint_every: Some(1000), ..Run::new(2) };
    let (folder, whole) = (tempdir().unwrap(), tempdir().unwrap());
    stopped_in_an_epoch(&run, folder.path());
    let before = Metrics::read(folder.path(), run.epochs).train_losses.len();
    std::fs::remove_dir_all(folder.path().join("train")).unwrap();
    let expected = sharded(&run, whole.path()).unwrap();
    let resumed = sharded(&run, folder.path()).unwrap();
    let after = Metrics::read(folder.path(), run.epochs).train_losses.len();
    let all = run.epochs * TRAIN.div_ceil(BATCH);
    assert!(before > 0 && before + after == all, "{before} and {after} of {all} batches");
    assert_same_bits(&resumed[0].head, &expected[0].head, "weights");
}
