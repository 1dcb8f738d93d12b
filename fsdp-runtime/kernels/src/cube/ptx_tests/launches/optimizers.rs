//! Launches of the kernels of optimizers.

use burn::tensor::DType;
use burn_cubecl::CubeBackend;

use super::{Gpu, NUMEL, OFFSETS, SEVERAL};
use crate::batched_steps::{self, StepBatch};
use crate::{AdamStep, AdamTensors, Kernels, SgdStep};

impl Gpu {
    /// Runs `step` on tensors at each of the offsets, alone, and on several in a batch.
    fn steps(&self, kernel: &str, step: impl Fn(usize, Option<&StepBatch>)) {
        for offset in OFFSETS {
            self.launch(kernel, &[], || step(offset, None));
        }
        self.launch(kernel, &[], || {
            batched_steps::scope(|| {
                let batch = batched_steps::open();
                (0..SEVERAL).for_each(|_| step(0, batch.as_deref()));
            });
        });
    }

    pub(super) fn adam_steps(&self) {
        for (amsgrad, cautious) in [(false, false), (false, true), (true, false), (true, true)] {
            let step = AdamStep {
                beta_1: 0.9,
                one_minus_beta_1: 0.1,
                beta_2: 0.999,
                one_minus_beta_2: 0.001,
                epsilon: 1e-8,
                root_scale: 1.0,
                step_size: 1e-3,
                penalty: 0.0,
                keep: 1.0,
                rate: 1e-4,
                cautious,
            };
            self.steps("adam_kernel", |offset, batch| {
                let tensor = || self.tensor_at(offset, NUMEL, DType::F32);
                let (param, moment_1, moment_2) = (tensor(), tensor(), tensor());
                let tensors = AdamTensors { param, moment_1, moment_2, max: amsgrad.then(tensor) };
                CubeBackend::adam(&step, tensor(), tensors, batch);
            });
        }
    }

    pub(super) fn sgd_steps(&self) {
        for (momentum, nesterov) in [(false, false), (true, false), (true, true)] {
            let step =
                SgdStep { lr: 1e-3, penalty: 0.1, momentum: 0.9, grad_factor: 1.0, nesterov };
            self.steps("sgd_kernel", |offset, batch| {
                let tensor = || self.tensor_at(offset, NUMEL, DType::F32);
                CubeBackend::sgd(&step, tensor(), tensor(), momentum.then(tensor), batch);
            });
        }
    }
}
