//! A rank that fails, panics, sleeps or issues other collectives ends the run on every rank, with
//! its error.

use std::time::{Duration, Instant};

use burn::backend::DispatchDevice;
use burn::tensor::Device;
use fsdp_runtime::Error;
use fsdp_runtime::errors::{CollectiveError, LaunchError, RankPanic, ShardError};
use fsdp_runtime::prelude::*;

use crate::support::{Net, batch, loss};

fn options(world: usize) -> LaunchOptions {
    LaunchOptions::new(world).with_device(Device::flex()).with_timeout(Duration::from_secs(30))
}

/// Trains six steps. Each rank calls `disturb` before each step.
fn train(
    options: LaunchOptions,
    disturb: impl Fn(&Worker, usize) -> Result<(), Error> + Send + Sync + 'static,
) -> Result<Vec<()>, LaunchError> {
    launch(options, move |worker| {
        let net = Net::new(3, 0.0, worker.device());
        let net = fully_shard(net, &worker, FsdpOptions::new().with_seed(1))?;
        for step in 0..6 {
            disturb(&worker, step)?;
            let (tokens, labels) = batch(step, 0..2, worker.device());
            net.backward(loss(net.forward(tokens), labels))?;
        }
        Ok::<_, Error>(())
    })
}

#[test]
fn a_rank_that_panics_in_step_3_ends_the_run() {
    let started = Instant::now();
    let error = train(options(3), |worker, step| {
        assert!(!(worker.rank().index() == 1 && step == 3), "the optimizer diverged");
        Ok(())
    })
    .unwrap_err();
    assert_eq!((error.rank.index(), error.world.size()), (1, 3));
    let panic = error.source.downcast_ref::<RankPanic>().expect("a panic");
    assert!(panic.message.contains("the optimizer diverged"), "{panic}");
    assert!(started.elapsed() < Duration::from_secs(20), "no rank waits for the time-out");
}

#[test]
fn a_rank_that_returns_an_error_ends_the_run() {
    let failure = Error::from(CollectiveError::Closed { rank: fsdp_runtime::Rank::ZERO });
    let expected = failure.clone();
    let error = train(options(2), move |worker, step| match (worker.rank().index(), step) {
        (1, 3) => Err(failure.clone()),
        _ => Ok(()),
    })
    .unwrap_err();
    assert_eq!(error.rank.index(), 1);
    assert_eq!(error.source.downcast_ref::<Error>(), Some(&expected));
}

#[test]
fn a_rank_that_ends_before_the_others_is_named_at_once() {
    let started = Instant::now();
    let error = launch(options(3), |worker| {
        let net = fully_shard(Net::new(3, 0.0, worker.device()), &worker, FsdpOptions::new())?;
        let steps = if worker.rank().index() == 1 { 2 } else { 3 };
        for step in 0..steps {
            let (tokens, labels) = batch(step, 0..2, worker.device());
            net.backward(loss(net.forward(tokens), labels))?;
        }
        Ok::<_, Error>(())
    })
    .unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(20), "no rank waits for the time-out");
    let Some(Error::Collective(CollectiveError::Ended { op, unit, ended })) =
        error.source.downcast_ref::<Error>()
    else {
        panic!("{error}")
    };
    assert_eq!((*op, unit.as_str()), ("all_gather", "(root)"));
    assert_eq!(ended.iter().map(|rank| rank.index()).collect::<Vec<_>>(), [1]);
}

#[test]
fn ranks_agree_on_the_number_of_steps_that_all_have_batches_for() {
    let steps = launch(options(3), |worker| worker.agree_steps(5 - worker.rank().index()));
    assert_eq!(steps.unwrap(), [3; 3]);
}

#[test]
fn an_all_reduce_of_different_lengths_is_an_error() {
    let error = launch(options(2), |worker| {
        worker.all_reduce_sum(&mut vec![1.0; 1 + worker.rank().index()])
    })
    .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("2 values") && text.contains("1 values"), "{text}");
}

#[test]
fn a_rank_that_sleeps_past_the_timeout_is_named_with_unit_and_operation() {
    let timeout = Duration::from_millis(800);
    let error = train(options(3).with_timeout(timeout), move |worker, step| {
        if worker.rank().index() == 2 && step == 3 {
            std::thread::sleep(3 * timeout);
        }
        Ok(())
    })
    .unwrap_err();
    assert_eq!(error.rank.index(), 2, "the rank at fault: {error}");
    let Some(Error::Collective(CollectiveError::Timeout { op, unit, missing, waited })) =
        error.source.downcast_ref::<Error>()
    else {
        panic!("{error}")
    };
    assert_eq!((*op, unit.as_str(), *waited), ("all_gather", "(root)", timeout));
    assert_eq!(missing.iter().map(|rank| rank.index()).collect::<Vec<_>>(), [2]);
}

#[test]
fn a_launch_does_not_wait_for_a_rank_that_never_ends() {
    let timeout = Duration::from_millis(500);
    let started = Instant::now();
    let error = train(options(2).with_timeout(timeout), |worker, step| {
        if worker.rank().index() == 1 && step == 1 {
            std::thread::sleep(Duration::from_secs(3600));
        }
        Ok(())
    })
    .unwrap_err();
    assert_eq!(error.rank.index(), 1);
    assert!(started.elapsed() < Duration::from_secs(30));
}

#[test]
fn ranks_that_take_different_branches_are_an_error() {
    let error = launch(options(2), |worker| {
        let net = Net::new(3, 0.0, worker.device());
        let net = fully_shard(
            net,
            &worker,
            FsdpOptions::new().with_seed(1).with_forward_prefetch(false),
        )?;
        let (tokens, _) = batch(0, 0..2, worker.device());
        // A data-dependent branch: rank 1 skips the first block.
        let x = net.embed.forward(tokens);
        if worker.is_rank_zero() {
            net.blocks[0].forward(x);
        } else {
            net.blocks[1].forward(x);
        }
        Ok::<_, Error>(())
    })
    .unwrap_err();
    let Some(Error::Collective(CollectiveError::Mismatch { found, expected, .. })) =
        error.source.downcast_ref::<Error>()
    else {
        panic!("{error}")
    };
    assert!(found.contains("blocks.") && expected.contains("blocks."), "{error}");
}

#[test]
fn a_loss_that_cannot_be_backpropagated_is_refused() {
    let error = launch(options(1), |worker| {
        let net = fully_shard(Net::new(1, 0.0, worker.device()), &worker, FsdpOptions::new())?;
        let plain = burn::tensor::Tensor::<1>::zeros([1], &Device::flex());
        let error = net.backward(plain).unwrap_err();
        assert!(error.to_string().contains("without autodiff"), "{error}");
        let several = burn::tensor::Tensor::<1>::zeros([3], worker.device());
        net.backward(several).map(|_| ())
    })
    .unwrap_err();
    assert!(error.to_string().contains("[3]"), "{error}");
}

#[test]
fn gradients_that_were_not_collected_are_an_error() {
    let error = launch(options(2), |worker| {
        let net = fully_shard(Net::new(2, 0.0, worker.device()), &worker, FsdpOptions::new())?;
        let (tokens, labels) = batch(0, 0..2, worker.device());
        loss(net.forward(tokens.clone()), labels).backward();
        net.forward(tokens);
        Ok::<_, Error>(())
    })
    .unwrap_err();
    assert!(error.to_string().contains("model.backward(loss)"), "{error}");
}

#[test]
fn a_world_of_no_ranks_is_refused() {
    let error = launch(options(0), |_| Ok::<_, Error>(())).unwrap_err();
    assert!(error.to_string().contains("world size of 0"), "{error}");
}

#[test]
fn a_device_of_another_backend_is_refused() {
    // Devices of other backends need features of Burn that are off here. A device with two layers
    // of autodiff is one that no backend of the crate serves, either.
    let device = DispatchDevice::autodiff(Device::flex().autodiff().as_dispatch().clone());
    for world in [1, 2] {
        let options = options(world).with_device(Device::new(device.clone()));
        let error = train(options, |_, _| Ok(())).unwrap_err();
        let cause = error.source.downcast_ref::<Error>();
        let refused = matches!(cause, Some(Error::Shard(ShardError::UnsupportedDevice { .. })));
        assert!(refused, "{error}");
        assert!(error.to_string().contains("use Flex or a CubeCL device"), "{error}");
    }
}
