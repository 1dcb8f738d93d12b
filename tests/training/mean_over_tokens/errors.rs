//! Weights and losses that have no mean are typed errors, after which training goes on.

use burn::tensor::Tensor;
use fsdp_runtime::Error;
use fsdp_runtime::errors::ScheduleError;
use fsdp_runtime::prelude::*;

use super::{ROWS, sum};
use crate::support::compare::assert_same_state;
use crate::support::{Net, on_ranks};

/// Runs forward on new rows, and returns a sum with its weight.
type Forward<'a> = &'a dyn Fn() -> (Tensor<1>, f64);

/// Does something wrong in a step that begins, and returns the errors.
type Wrong = fn(&Fsdp<Net>, Forward<'_>) -> Vec<Error>;

/// Takes a step, and something wrong before it. Returns the errors of each rank.
fn errors_of(wrong: Wrong) -> Vec<Vec<ScheduleError>> {
    let run = |wrong: Wrong| {
        on_ranks(2, move |worker| {
            let options = FsdpOptions::new().with_seed(7);
            let mut net = fully_shard(Net::new(1, 0.0, worker.device()), worker, options)?;
            let rank = worker.rank().index();
            let errors = wrong(&net, &|| sum(&net, rank * ROWS, &[3 + rank]));
            let (first, weight) = sum(&net, rank * ROWS, &[2]);
            net.accumulate_sum(first, weight)?;
            let (last, weight) = sum(&net, rank * ROWS, &[4 * rank]);
            let gradients = net.backward_sum(last, weight)?;
            net = burn::optim::SgdConfig::new().init().step(1.0, net, gradients);
            Ok((errors, net.state().full(Recipient::All)?))
        })
    };
    let mut found = Vec::new();
    for ((errors, state), (_, expected)) in run(wrong).into_iter().zip(run(|_, _| Vec::new())) {
        assert_same_state(&state, &expected, "an error changes nothing");
        assert!(!errors.is_empty());
        found.push(
            errors
                .into_iter()
                .map(|error| match error {
                    Error::Schedule(error) => error,
                    other => panic!("{other}"),
                })
                .collect(),
        );
    }
    found
}

#[test]
fn a_step_without_a_counted_row_is_an_error_on_every_rank() {
    let all = errors_of(|net, forward| {
        let (loss, _) = forward();
        vec![net.backward_sum(loss, 0.0).expect_err("no weight")]
    });
    for errors in all {
        assert_eq!(errors, [ScheduleError::NoWeight]);
        let text = errors[0].to_string();
        assert!(text.contains("0 on every rank"), "{text}");
    }
}

/// The step goes on: a later micro-batch may have a counted row.
#[test]
fn micro_batches_without_a_counted_row_are_an_error_at_the_last_one() {
    on_ranks(2, |worker| {
        let options = FsdpOptions::new().with_seed(7);
        let net = fully_shard(Net::new(1, 0.0, worker.device()), worker, options)?;
        for _ in 0..2 {
            let (none, weight) = sum(&net, 0, &[0]);
            net.accumulate_sum(none, weight)?;
        }
        let (none, weight) = sum(&net, 0, &[0]);
        let error = net.backward_sum(none, weight).expect_err("no weight");
        assert!(matches!(error, Error::Schedule(ScheduleError::NoWeight)), "{error}");
        let (some, weight) = sum(&net, 0, &[worker.rank().index()]);
        let found = net.backward_sum(some, weight)?;
        let (some, weight) = sum(&net, 0, &[worker.rank().index()]);
        let expected = net.backward_sum(some, weight)?;
        let id = net.head.bias.as_ref().expect("a bias").id;
        let of = |gradients: &burn::optim::GradientsParams| {
            gradients.get::<1>(id).expect("a gradient").into_data()
        };
        assert_eq!(of(&found), of(&expected));
        assert!(of(&found).iter::<f32>().any(|element| element != 0.0));
        Ok(())
    });
}

#[test]
fn weights_that_are_no_number_of_tokens_are_errors() {
    let all = errors_of(|net, forward| {
        [-1.0, f64::NAN, f64::INFINITY]
            .map(|weight| net.backward_sum(forward().0, weight).expect_err("no weight"))
            .into()
    });
    for errors in all {
        for (error, text) in errors.into_iter().zip(["is -1;", "is NaN;", "is inf;"]) {
            assert!(matches!(error, ScheduleError::InvalidWeight { .. }), "{error}");
            assert!(error.to_string().contains(text), "{error}");
        }
    }
}

#[test]
fn a_sum_that_backward_cannot_take_is_the_error_of_backward() {
    let all = errors_of(|net, forward| {
        let (loss, weight) = forward();
        let untracked = net.backward_sum(loss.clone().detach(), 0.0);
        let several = net.accumulate_sum(loss.clone().repeat_dim(0, 2), weight);
        net.backward_sum(loss.clone(), weight).expect("a sum");
        let consumed = net.backward_sum(loss.clone(), weight);
        // The kind of the failed loss is forgotten with it.
        let consumed_mean = net.backward(loss);
        vec![
            untracked.expect_err("detached"),
            several.expect_err("two elements"),
            consumed.expect_err("a second backward"),
            consumed_mean.expect_err("a third backward"),
        ]
    });
    for errors in all {
        assert_eq!(errors[0], ScheduleError::UntrackedLoss);
        assert!(matches!(errors[1], ScheduleError::InvalidLoss { .. }), "{}", errors[1]);
        assert_eq!(errors[2..], [ScheduleError::GraphConsumed, ScheduleError::GraphConsumed]);
    }
}

#[test]
fn means_and_sums_in_one_step_are_an_error() {
    on_ranks(2, |worker| {
        let options = FsdpOptions::new().with_seed(7);
        let net = fully_shard(Net::new(1, 0.0, worker.device()), worker, options)?;
        let loss = || sum(&net, 0, &[3]);
        let mixed = |error: Error, sum: bool, text: &str| {
            let expected = Error::Schedule(ScheduleError::MixedLosses { sum });
            assert_eq!(error, expected);
            assert!(error.to_string().contains(text), "{error}");
        };
        net.accumulate(loss().0)?;
        let text = "this micro-batch is a sum with a weight, but those of earlier ones";
        mixed(net.accumulate_sum(loss().0, 3.0).expect_err("mixed"), true, text);
        mixed(net.backward_sum(loss().0, 3.0).expect_err("mixed"), true, text);
        net.backward(loss().0)?;

        net.accumulate_sum(loss().0, 3.0)?;
        let text = "this micro-batch is a mean, but those of earlier ones";
        mixed(net.accumulate(loss().0).expect_err("mixed"), false, text);
        mixed(net.backward(loss().0).expect_err("mixed"), false, text);
        net.backward_sum(loss().0, 3.0)?;
        net.backward(loss().0)?;
        Ok(())
    });
}
