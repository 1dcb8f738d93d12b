//! How sums of gradients are divided, and the hook on reduced gradients.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use fsdp_runtime::errors::{LaunchError, ScheduleError};
use fsdp_runtime::prelude::*;

use super::super::mlp::{HIDDEN, Mlp, gradient, input, loss, on_ranks, sharded};
use super::super::support::ranks::launch_options;
use super::Prepare;

/// The ranks' gradients of a bias are 0, 1, 2 and 3.
fn divided(options: FsdpOptions, prepare: Prepare) -> Result<Vec<f32>, LaunchError> {
    launch(launch_options(4), move |worker| {
        let model = sharded(1, &worker, options.clone())?;
        prepare(&model)?;
        let bias = model.head.bias.as_ref().expect("with a bias");
        let scale = worker.rank().index() as f32;
        let output = model.forward(input(0, 0, 1, worker.device())).sum() * scale;
        let gradients = model.backward(output)?;
        Ok::<_, Error>(gradient(&gradients, bias).expect("used")[0])
    })
}

#[test]
fn gradients_are_divided_by_the_factor() {
    let strategies = [
        FsdpOptions::new(),
        FsdpOptions::new().with_strategy(ShardingStrategy::NoShard),
        FsdpOptions::new().with_strategy(ShardingStrategy::HybridShard).with_shard_size(2),
    ];
    for options in strategies {
        for (factor, expected) in [(1.0, 6.0), (2.0, 3.0), (4.0, 1.5), (2.5, 2.4), (0.5, 12.0)] {
            let found = divided(options.clone().with_gradient_divide_factor(factor), |_| Ok(()));
            assert_eq!(found.unwrap(), [expected; 4], "{factor}");
        }
        let set = divided(options.clone(), |model| model.set_gradient_divide_factor(1.0));
        assert_eq!(set.unwrap(), [6.0; 4]);
        let back = divided(options.with_gradient_divide_factor(1.0), |model| {
            model.set_gradient_divide_factor(4.0)
        });
        assert_eq!(back.unwrap(), [1.5; 4]);
    }
}

#[test]
fn a_factor_that_is_not_positive_is_refused() {
    for factor in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let options = FsdpOptions::new().with_gradient_divide_factor(factor);
        let error = divided(options, |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("gradient_divide_factor") && error.contains("positive"), "{error}");
    }
    let set = divided(FsdpOptions::new(), |model| model.set_gradient_divide_factor(0.0));
    assert!(set.unwrap_err().to_string().contains("use a positive number"));
}

/// What a hook has been given: by path the full shape, and the elements of each call.
type Seen = Arc<Mutex<BTreeMap<String, (Vec<usize>, Vec<f32>)>>>;

#[test]
fn a_hook_gets_each_reduced_gradient_once_a_step_and_replaces_it() {
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
        on_ranks(2, move |worker| {
            let options = FsdpOptions::new().with_strategy(strategy);
            let mut model = sharded(2, worker, options)?;
            let x = |step| input(worker.rank().index(), step, 4, worker.device());
            let step = |model: &Fsdp<Mlp>| {
                model.accumulate(loss(model.forward(x(0))))?;
                model.backward(loss(model.forward(x(1))))
            };
            let plain = step(&model)?;
            let seen = Seen::default();
            let hooked = seen.clone();
            model.set_gradient_hook(move |of, gradient| {
                let elements: Vec<f32> = gradient.to_data().iter().collect();
                assert_eq!(elements.len(), of.range.len());
                let entry = (of.shape.to_vec(), elements);
                let earlier = hooked.lock().unwrap().insert(of.path.to_string(), entry);
                assert!(earlier.is_none(), "{} twice", of.path);
                if of.path == "blocks.1.up.bias" { gradient * 2.0 } else { gradient }
            });
            let gradients = step(&model)?;
            let seen = std::mem::take(&mut *seen.lock().unwrap());
            // Under `FULL_SHARD` a rank has one of the two matrices of a block.
            let expected = if strategy == ShardingStrategy::FullShard { 8 } else { 10 };
            assert_eq!(seen.len(), expected, "{:?}", seen.keys());
            let block = model.blocks[1].clone();
            let bias = block.up.bias.as_ref().expect("with a bias");
            let before = gradient(&plain, bias).expect("used");
            assert_eq!(seen["blocks.1.up.bias"], (vec![HIDDEN], before.clone()));
            let twice: Vec<f32> = before.iter().map(|element| element * 2.0).collect();
            assert_eq!(gradient(&gradients, bias), Some(twice));
            for matrix in [&block.up.weight, &block.down.weight] {
                assert_eq!(gradient(&gradients, matrix), gradient(&plain, matrix));
                let shape = |of: &GradientsParams| of.get::<2>(matrix.id).map(|it| it.dims());
                assert_eq!(shape(&gradients), shape(&plain));
            }

            model.clear_gradient_hook();
            let gradients = step(&model)?;
            assert_eq!(gradient(&gradients, bias), Some(before));
            Ok(())
        });
    }
}

#[test]
fn a_hook_that_changes_the_number_of_elements_is_refused() {
    on_ranks(2, |worker| {
        let mut model = sharded(1, worker, FsdpOptions::new())?;
        model.set_gradient_hook(|_, gradient: Tensor<1>| gradient.slice(0..1));
        let loss = loss(model.forward(input(0, 0, 4, worker.device())));
        let error = model.backward(loss).unwrap_err();
        let is_refused =
            matches!(error, Error::Schedule(ScheduleError::HookedGradient { found: 1, .. }));
        assert!(is_refused, "{error}");
        Ok(())
    });
}
