//! A loss that `backward` cannot take is a typed error on every rank, and training goes on after it.

use burn::module::Param;
use burn::tensor::Tensor;
use fsdp_runtime::Error;
use fsdp_runtime::errors::ScheduleError;
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;

use super::support::on_ranks;
use super::support::small::Pair;

const WIDTHS: [usize; 3] = [8, 16, 4];

/// Does something wrong with the model and its loss, and returns the error.
type Wrong = fn(&Fsdp<Pair>, &Tensor<1>) -> Option<Error>;

/// Trains four steps, with something wrong after the backward of each. Returns the errors, and the bits
/// of the losses and of this rank's first shard.
fn trained(
    worker: &Worker,
    options: FsdpOptions,
    wrong: Wrong,
) -> Result<(Vec<Error>, Vec<u32>), Error> {
    let model = Pair::new(WIDTHS, worker.device());
    let mut model = fully_shard(model, worker, options.with_seed(3))?;
    let mut optimizer = AdamWConfig::new().init();
    let (mut errors, mut bits) = (Vec::new(), Vec::new());
    for step in 0..4 {
        let x = Tensor::<2>::full(
            [3, WIDTHS[0]],
            0.1 * (step + worker.rank().index()) as f32,
            worker.device(),
        );
        let loss = model.forward(x).powf_scalar(2.0).mean();
        bits.push(loss.clone().into_scalar::<f32>().to_bits());
        let gradients = model.backward(loss.clone())?;
        errors.extend(wrong(&model, &loss));
        model = optimizer.step(1e-2, model, gradients);
    }
    let elements = |param: &Param<Tensor<2>>| param.base().into_data();
    bits.extend(elements(&model.first.weight).iter::<f32>().map(f32::to_bits));
    Ok((errors, bits))
}

fn assert_every_step_fails(wrong: Wrong, expected: fn(&ScheduleError) -> bool, text: &'static str) {
    for options in [
        FsdpOptions::new(),
        FsdpOptions::new().with_strategy(ShardingStrategy::NoShard),
        FsdpOptions::new().with_activation_checkpointing(ActivationCheckpointing::All),
    ] {
        let plain = options.clone();
        let without = on_ranks(2, move |worker| trained(worker, plain.clone(), |_, _| None));
        let ranks = on_ranks(2, move |worker| trained(worker, options.clone(), wrong));
        for ((errors, bits), (none, expected_bits)) in ranks.into_iter().zip(without) {
            assert_eq!((errors.len(), none.len()), (4, 0));
            for error in errors {
                let Error::Schedule(cause) = &error else { panic!("{error}") };
                assert!(expected(cause), "{error}");
                assert!(error.to_string().contains(text), "{error}");
            }
            assert_eq!(bits, expected_bits, "an error changes nothing");
        }
    }
}

#[test]
fn a_second_backward_of_one_forward_says_to_run_forward_again() {
    assert_every_step_fails(
        |model, loss| model.backward(loss.clone()).err(),
        |cause| matches!(cause, ScheduleError::GraphConsumed),
        "run the model's `forward` again",
    );
}

#[test]
fn a_loss_made_of_data_says_that_it_depends_on_no_parameter() {
    assert_every_step_fails(
        |model, loss| {
            let copy = Tensor::<1>::from_data(loss.clone().into_data(), &loss.device());
            model.backward(copy).err()
        },
        |cause| matches!(cause, ScheduleError::UntrackedLoss),
        "compute it from the output of the model's `forward`",
    );
    assert_every_step_fails(
        |model, loss| model.accumulate(loss.clone().detach()).err(),
        |cause| matches!(cause, ScheduleError::UntrackedLoss),
        "depends on no tracked tensor",
    );
}
