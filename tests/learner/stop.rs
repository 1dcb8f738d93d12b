//! One decision for all ranks when to stop.

use burn::train::metric::LossMetric;
use burn::train::metric::store::{Aggregate, Direction, Split};
use burn::train::{MetricEarlyStoppingStrategy, StoppingCondition};
use fsdp_runtime::Rank;
use tempfile::tempdir;

use super::run::{BATCH, Metrics, Run, TRAIN, sharded, sharded_with};
use super::support::compare::assert_same_bits;

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

#[test]
fn a_stopped_run_saves_a_checkpoint_to_resume_from() {
    let run = Run { checkpoint_every: Some(1000), ..Run::new(2) };
    let folder = tempdir().unwrap();
    let stopped = sharded_with(&run, folder.path(), |worker, training| {
        if worker.rank() == Rank::ZERO {
            training.interrupter().stop(None);
        }
        training
    });
    stopped.unwrap();
    assert!(folder.path().join("checkpoints").read_dir().unwrap().next().is_some());
    let whole = tempdir().unwrap();
    let expected = sharded(&run, whole.path()).unwrap();
    let resumed = sharded(&run, folder.path()).unwrap();
    let losses = Metrics::read(folder.path(), run.epochs).train_losses;
    assert_eq!(
        losses.len(),
        run.epochs * TRAIN.div_ceil(BATCH),
        "nothing was trained before the stop"
    );
    assert_same_bits(&resumed[0].head, &expected[0].head, "weights");
}
