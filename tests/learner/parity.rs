//! The numbers of a sharded run are those of Burn's single-device run on the batches of all ranks
//! together.

use burn::optim::{AdamWConfig, LambConfig};
use fsdp_runtime::prelude::*;
use tempfile::tempdir;

use super::run::{Metrics, Run, plain, sharded, sharded_with, strategy};
use super::support::compare::{Within, assert_close};

const CLOSE: Within = Within::Scaled(1e-5);

/// Runs both and compares them.
fn assert_parity(run: &Run) {
    let (single, ranks) = (tempdir().unwrap(), tempdir().unwrap());
    let expected = plain(run, single.path());
    let outcomes = sharded(run, ranks.path()).unwrap();
    let expected_metrics = Metrics::read(single.path(), run.epochs);
    let metrics = Metrics::read(ranks.path(), run.epochs);
    let Metrics { train_losses, valid_losses, valid_accuracies } = &metrics;
    assert_eq!(train_losses.len(), run.epochs * 9, "a loss for each batch");
    assert_close(train_losses, &expected_metrics.train_losses, CLOSE, "training losses");
    assert_close(valid_losses, &expected_metrics.valid_losses, CLOSE, "validation losses");
    assert_close(valid_accuracies, &expected_metrics.valid_accuracies, CLOSE, "accuracies");
    for outcome in outcomes {
        assert_close(&outcome.head, &expected, CLOSE, "weights");
    }
}

#[test]
fn losses_metrics_and_weights_are_those_of_burns_learner() {
    for world in [1, 2, 4] {
        assert_parity(&Run::new(world));
    }
}

#[test]
fn accumulated_gradients_are_summed_as_by_burn() {
    for world in [1, 2] {
        // Nine batches: the last step of an epoch has one.
        assert_parity(&Run { accumulation: Some(4), ..Run::new(world) });
    }
}

#[test]
fn strategies_have_the_same_numbers() {
    for strategy in [ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard] {
        let options = FsdpOptions::new().with_strategy(strategy);
        assert_parity(&Run { options, ..Run::new(2) });
    }
}

#[test]
fn an_optimizer_of_full_matrices_steps_them_with_whole_param() {
    let optimizer = || LambConfig::new().init();
    assert_parity(&Run { optimizer, whole_param: true, ..Run::new(2) });
}

/// An interval above the number of batches still gives the metrics of an epoch's last batch.
#[test]
fn the_last_batch_of_an_epoch_goes_to_the_metrics() {
    let whole = tempdir().unwrap();
    sharded(&Run::new(2), whole.path()).unwrap();
    let all = Metrics::read(whole.path(), 2).train_losses;
    for world in [1, 2] {
        for (interval, batches) in [(4, vec![3, 7, 8, 12, 16, 17]), (100, vec![8, 17])] {
            let (run, folder) = (Run::new(world), tempdir().unwrap());
            let path = folder.path().to_path_buf();
            let (settings, changed) = (run.clone(), path.clone());
            let ranks = sharded_with(&run, &path, move |worker, training| {
                let strategy = strategy(&settings, &changed, worker);
                training.with_training_strategy(strategy.with_metric_interval(interval).into())
            });
            ranks.unwrap();
            let expected: Vec<f64> = batches.into_iter().map(|batch| all[batch]).collect();
            let losses = Metrics::read(&path, 2).train_losses;
            assert_close(&losses, &expected, CLOSE, format!("every {interval} at {world}"));
        }
    }
}

#[test]
fn gradients_are_clipped_by_their_norm_over_all_ranks() {
    let train = |world, clip| {
        let folder = tempdir().unwrap();
        let optimizer = || burn::optim::SgdConfig::new().init();
        let run = Run { clip, optimizer, ..Run::new(world) };
        sharded(&run, folder.path()).unwrap().swap_remove(0).head
    };
    let one = train(1, Some(0.05));
    assert_close(&train(4, Some(0.05)), &one, CLOSE, "clipped");
    let change = train(1, None).iter().zip(&one).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(change > 1e-3, "the norm is above the bound: {change}");
}

#[test]
fn shuffled_epochs_are_the_same_at_every_number_of_ranks() {
    let train = |world| {
        let folder = tempdir().unwrap();
        let optimizer = || AdamWConfig::new().init();
        let run = Run { shuffle: Some(11), optimizer, ..Run::new(world) };
        sharded(&run, folder.path()).unwrap();
        Metrics::read(folder.path(), run.epochs).train_losses
    };
    let one = train(1);
    assert_close(&train(2), &one, CLOSE, "two ranks");
    assert_close(&train(4), &one, CLOSE, "four ranks");
    let in_order = tempdir().unwrap();
    sharded(&Run::new(1), in_order.path()).unwrap();
    assert_ne!(Metrics::read(in_order.path(), 2).train_losses, one);
}
