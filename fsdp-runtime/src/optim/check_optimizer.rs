//! [`Fsdp::check_optimizer`].

use burn::module::{Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Device, Tensor};

use super::on_host::host_device;
use super::single_param::SingleParam;
use crate::error::Error;
use crate::fully_shard::Fsdp;
use crate::fully_shard::optimizer_check::{Waiting, catch_step, read, refuse};
use crate::fully_shard::optimizer_probe::{Part, Verdict};
use crate::module::{FsdpModule, ParamVisitor};
use crate::param_group::Unit;

/// Learning rate of the steps.
const LEARNING_RATE: f64 = 1e-2;

/// Factors of the gradients of the steps.
const FACTORS: [f32; 3] = [1.0, -0.3, 2.0];

impl<M: FsdpModule> Fsdp<M> {
    /// Checks that an optimizer steps shards as it steps whole parameters. It then steps the model
    /// without a further check.
    ///
    /// The first `optimizer.step(lr, model, gradients)` checks the optimizer in any case. Call this
    /// method where that check does not apply:
    ///
    /// - for a second optimizer of the same model,
    /// - for an optimizer with parameter groups that are given by ids,
    /// - for gradients that do not come from [`backward`](Self::backward) unchanged.
    ///
    /// Copies of the optimizer without state step small matrices three times, whole and split. The
    /// optimizer and its state do not change.
    ///
    /// # Errors
    ///
    /// [`OptimizerClipsByNorm`](crate::ScheduleError::OptimizerClipsByNorm) and
    /// [`OptimizerNeedsMatrix`](crate::ScheduleError::OptimizerNeedsMatrix).
    pub fn check_optimizer(&self, optimizer: &ModuleOptimizer) -> Result<(), Error> {
        let mut find = FindSharded { units: self.schedule.units(), found: Vec::new() };
        self.module.visit_params(&mut find);
        // Without state, which has the shapes of shards.
        let optimizer = optimizer.clone().load_record(OptimizerRecord::default());
        for Waiting { id, path, device } in find.found {
            let device = host_device(&device);
            refuse(judge(&optimizer, id, &path, &device)?, &path)?;
            self.optimizer_check.pass(id);
        }
        Ok(())
    }
}

/// Steps the probe of one parameter.
fn judge(
    optimizer: &ModuleOptimizer,
    id: ParamId,
    path: &str,
    device: &Device,
) -> Result<Verdict, Error> {
    catch_step(|| {
        let [huge, small, piece] = Part::ALL.map(|part| values(optimizer, id, path, part, device));
        let steps = huge.into_iter().zip(small).zip(piece);
        let mut verdicts = steps.map(|((huge, small), piece)| Verdict::of(&[huge, small, piece]));
        verdicts.find(|verdict| refuse(*verdict, path).is_err()).unwrap_or(Verdict::ElementWise)
    })
}

/// Returns a part of a probe after each step.
fn values(
    optimizer: &ModuleOptimizer,
    id: ParamId,
    path: &str,
    part: Part,
    device: &Device,
) -> Vec<Vec<f32>> {
    let mut optimizer = optimizer.clone();
    let param = Param::initialized(id, Tensor::from_inner(part.value(device)));
    let mut module = SingleParam { path: vec![path.to_string()], param };
    let mut step = |factor: f32| {
        let mut gradients = GradientsParams::new();
        gradients.register(id, part.gradient(device) * factor);
        module = optimizer.step(LEARNING_RATE, module.clone(), gradients);
        read(module.param.base().inner())
    };
    FACTORS.into_iter().map(&mut step).collect()
}

/// The visitor that lists the sharded parameters that are trained.
struct FindSharded<'a> {
    units: &'a [Unit],
    found: Vec<Waiting>,
}

impl ParamVisitor for FindSharded<'_> {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.found.extend(Waiting::of(param, self.units));
    }
}
