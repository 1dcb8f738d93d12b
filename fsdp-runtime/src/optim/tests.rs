//! Tests of optimizer steps that share kernel launches.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{Module, Param};
use burn::optim::{GradientsParams, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor, TensorData};
use fsdp_kernels::batched_steps::{open, scope};

use super::{AdamConfig, AdamWConfig, SgdConfig};

/// Lengths of parameters: more parameters than share a launch, and empty, odd and short ones.
const LENGTHS: [usize; 20] =
    [64, 1, 7, 1031, 0, 4096, 64, 3, 100, 9001, 16, 17, 64, 33, 5000, 2, 8, 128, 999, 32];

#[derive(Module, Debug)]
struct Many {
    params: Vec<Param<Tensor<1>>>,
}

fn numbers(seed: usize, len: usize) -> Tensor<1> {
    let number = |i: usize| ((i * 31 + seed * 101) % 97) as f32 * 0.02 - 0.9;
    let numbers: Vec<f32> = (0..len).map(number).collect();
    Tensor::from_data(TensorData::new(numbers, [len]), &Device::cpu())
}

impl Many {
    fn new() -> Self {
        let autodiff = Device::cpu().autodiff();
        let param = |(seed, &len)| {
            Param::from_tensor(Tensor::from_data(numbers(seed, len).into_data(), &autodiff))
        };
        Self { params: LENGTHS.iter().enumerate().map(param).collect() }
    }

    /// Returns gradients for two of every three parameters.
    fn gradients(&self, step: usize) -> GradientsParams {
        let mut gradients = GradientsParams::new();
        for (seed, param) in self.params.iter().enumerate().filter(|(seed, _)| seed % 3 != 2) {
            gradients.register(param.id, numbers(seed * 7 + step, param.val().dims()[0]));
        }
        gradients
    }

    fn bits(&self) -> Vec<Vec<u32>> {
        let bits = |param: &Param<Tensor<1>>| {
            param.val().into_data().iter::<f32>().map(f32::to_bits).collect()
        };
        self.params.iter().map(bits).collect()
    }
}

fn optimizers() -> [ModuleOptimizer; 4] {
    [
        AdamWConfig::new().with_amsgrad(true).init(),
        AdamConfig::new().with_weight_decay(0.1).init(),
        SgdConfig::new().init(),
        SgdConfig::new().with_momentum(0.9).init(),
    ]
}

#[test]
fn shared_and_separate_launches_give_the_same_bits() {
    for (mut shared, mut single) in optimizers().into_iter().zip(optimizers()) {
        let (mut a, mut b) = (Many::new(), Many::new());
        for step in 0..3 {
            let gradients = a.gradients(step);
            a = scope(|| shared.step(1e-2, a, gradients));
            let gradients = b.gradients(step);
            b = single.step(1e-2, b, gradients);
        }
        assert_eq!(a.bits(), b.bits());
        assert_ne!(a.bits(), Many::new().bits());
    }
}

/// An optimizer that wraps another one reads the result of a step at once. So a step is deferred
/// only if `foreach` allows it.
#[test]
fn a_step_is_deferred_only_with_foreach() {
    let moved = |foreach| {
        let adam = AdamWConfig::new().build().with_foreach(foreach);
        let (before, gradient) = (numbers(1, 64), numbers(2, 64));
        let bits = |tensor: &Tensor<1>| tensor.to_data().iter::<f32>().collect::<Vec<_>>();
        scope(|| {
            let (after, _) = adam.step(1e-2, before.clone() + 0.0, gradient, None);
            bits(&after) != bits(&before)
        })
    };
    assert!(moved(false));
    assert!(!moved(true));
}

#[test]
fn deferred_steps_are_discarded_after_a_panic() {
    let mut optimizer = AdamWConfig::new().init();
    let many = Many::new();
    let kept = many.clone();
    let gradients = many.gradients(0);
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        scope(|| {
            let _ = optimizer.step(1e-2, many, gradients);
            panic!("a mapper fails");
        })
    }));
    assert!(unwound.is_err() && open().is_none());
    scope(|| ());
    assert_eq!(kept.bits(), Many::new().bits());
}
