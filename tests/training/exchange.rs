//! The collectives on host values that programs use: `worker.exchange`, `gather`, `broadcast`,
//! `reduce` and `gather_for_metrics`.

use burn::tensor::{Bool, Int, Tensor, TensorData};
use fsdp_runtime::errors::{CollectiveError, LaunchError};
use fsdp_runtime::launch::ReduceOp;
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Error, Rank};
use serde::{Deserialize, Serialize};

use crate::support::on_ranks;
use crate::support::ranks::launch_options;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Report {
    rank: usize,
    words: Vec<String>,
}

fn report(worker: &Worker) -> Report {
    let rank = worker.rank().index();
    Report { rank, words: vec!["word".into(); rank] }
}

/// Returns the last rank of a world.
fn last(worker: &Worker) -> Rank {
    worker.world().ranks().last().expect("a world has ranks")
}

fn mismatch<T>(launched: Result<Vec<T>, LaunchError>) -> String {
    let error = launched.err().expect("the ranks differ");
    let cause = error.source.downcast_ref::<Error>();
    assert!(matches!(cause, Some(Error::Collective(CollectiveError::Mismatch { .. }))), "{error}");
    error.to_string()
}

#[test]
fn every_rank_gets_the_values_of_all() {
    for world in [1, 3] {
        on_ranks(world, move |worker| {
            let all = worker.exchange(report(worker))?;
            assert_eq!(all.len(), world);
            for (rank, found) in all.iter().enumerate() {
                assert_eq!(**found, Report { rank, words: vec!["word".into(); rank] });
            }
            Ok(())
        });
    }
}

#[test]
fn one_rank_gets_the_values_of_all() {
    on_ranks(3, |worker| {
        let to = last(worker);
        let all = worker.gather(to, report(worker))?;
        assert_eq!(all.is_some(), worker.rank() == to);
        if let Some(all) = all {
            assert_eq!(all.iter().map(|report| report.rank).collect::<Vec<_>>(), [0, 1, 2]);
        }
        Ok(())
    });
}

#[test]
fn every_rank_gets_the_value_of_one() {
    on_ranks(3, |worker| {
        let from = last(worker);
        let mut calls = 0;
        let found = worker.broadcast(from, || {
            calls += 1;
            report(worker)
        })?;
        assert_eq!(found.rank, 2);
        assert_eq!(calls, usize::from(worker.rank() == from), "one rank makes the value");
        Ok(())
    });
}

#[test]
fn values_are_reduced_over_all_ranks() {
    on_ranks(4, |worker| {
        let rank = worker.rank().index() as f64;
        for (op, expected) in [
            (ReduceOp::Sum, [6.0, -6.0]),
            (ReduceOp::Mean, [1.5, -1.5]),
            (ReduceOp::Min, [0.0, -3.0]),
            (ReduceOp::Max, [3.0, 0.0]),
        ] {
            let mut values = [rank, -rank];
            worker.reduce(&mut values, op)?;
            assert_eq!(values, expected, "{op:?}");
        }
        Ok(())
    });
}

#[test]
fn rows_of_all_ranks_are_joined_without_those_that_do_not_count() {
    on_ranks(3, |worker| {
        let device = worker.device();
        let rank = worker.rank().index();
        // Rank r has r + 1 rows, of which r count.
        let elements: Vec<f32> = (0..2 * (rank + 1)).map(|at| (10 * rank + at) as f32).collect();
        let rows = Tensor::<2>::from_data(TensorData::new(elements, [rank + 1, 2]), device);
        let all = worker.gather_for_metrics(rows.clone(), rank)?.expect("some rows count");
        let expected = [[10.0, 11.0], [20.0, 21.0], [22.0, 23.0]];
        all.into_data().assert_eq(&TensorData::from(expected), false);

        let labels = Tensor::<1, Int>::from_data(TensorData::from([rank as i32]), device);
        let all = worker.gather_for_metrics(labels, 1)?.expect("all rows count");
        assert_eq!(all.into_data().iter::<i64>().collect::<Vec<_>>(), [0, 1, 2]);
        let flags = Tensor::<1, Bool>::from_data(TensorData::from([rank == 1]), device);
        let all = worker.gather_for_metrics(flags, 1)?.expect("all rows count");
        assert_eq!(all.into_data().iter::<bool>().collect::<Vec<_>>(), [false, true, false]);
        assert!(worker.gather_for_metrics(rows, 0)?.is_none());
        Ok(())
    });
}

#[test]
fn ranks_that_give_different_things_are_told_so() {
    let types = mismatch(launch(launch_options(2), |worker| match worker.rank() {
        Rank::ZERO => worker.exchange(1u32).map(drop),
        _ => worker.exchange(1u64).map(drop),
    }));
    assert!(types.contains("`u32`") && types.contains("`u64`"), "{types}");
    let roots = mismatch(launch(launch_options(2), |worker| {
        worker.broadcast(worker.rank(), || 1).map(drop)
    }));
    assert!(roots.contains("from rank 0") && roots.contains("from rank 1"), "{roots}");
    let ops = mismatch(launch(launch_options(2), |worker| {
        let op = if worker.is_rank_zero() { ReduceOp::Min } else { ReduceOp::Max };
        worker.reduce(&mut [1.0], op)
    }));
    assert!(ops.contains("Min") && ops.contains("Max"), "{ops}");
    let rows = mismatch(launch(launch_options(2), |worker| {
        let columns = 2 + worker.rank().index();
        let rows = Tensor::<2>::ones([1, columns], worker.device());
        worker.gather_for_metrics(rows, 1).map(drop)
    }));
    assert!(rows.contains("[2]") && rows.contains("[3]"), "{rows}");
}
