//! [`Fsdp::check_optimizer`].

use std::ops::Range;

use burn::module::Param;
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::tensor::Tensor;

use super::single_param::SingleParam;
use crate::error::Error;
use crate::fully_shard::Fsdp;
use crate::fully_shard::optimizer_check::{Waiting, catch_step, read, refuse};
use crate::fully_shard::optimizer_probe::{Part, ProbeGradients, STEPS, Verdict};
use crate::module::{FsdpModule, ParamVisitor};
use crate::param_group::Unit;

/// Learning rate of the steps.
const LEARNING_RATE: f64 = 1e-2;

impl<M: FsdpModule> Fsdp<M> {
    /// Checks that an optimizer steps shards as it steps whole parameters. It then steps the model
    /// without a further check.
    ///
    /// The first three `optimizer.step(lr, model, gradients)` check the optimizer in any case. Call
    /// this method where that check does not apply:
    ///
    /// - for a second optimizer of the same model,
    /// - for an optimizer with parameter groups that are given by ids,
    /// - for gradients that do not come from [`backward`](Self::backward) unchanged.
    ///
    /// Copies of the optimizer without state step matrices of up to 160 rows and columns three
    /// times, whole and as pieces. The optimizer and its state do not change.
    ///
    /// # Errors
    ///
    /// [`OptimizerClipsByNorm`](crate::errors::ScheduleError::OptimizerClipsByNorm) and
    /// [`OptimizerNeedsMatrix`](crate::errors::ScheduleError::OptimizerNeedsMatrix).
    pub fn check_optimizer(&self, optimizer: &ModuleOptimizer) -> Result<(), Error> {
        let mut find = FindSharded { units: self.schedule.units(), found: Vec::new() };
        self.module.visit_params(&mut find);
        // Without state, which has the shapes of shards.
        let optimizer = optimizer.clone().load_record(OptimizerRecord::default());
        let mut gradients = ProbeGradients::default();
        for waiting in find.found {
            refuse(judge(&optimizer, &waiting, &mut gradients, 0..STEPS)?, &waiting.path)?;
            self.optimizer_check.pass(waiting.id);
        }
        Ok(())
    }
}

/// Steps the probe of one parameter.
fn judge(
    optimizer: &ModuleOptimizer,
    probe: &Waiting,
    gradients: &mut ProbeGradients,
    steps: Range<usize>,
) -> Result<Verdict, Error> {
    catch_step(|| {
        let mut optimizers = Part::ALL.map(|part| (part, optimizer.clone()));
        let mut step = |step: usize| {
            let parts = optimizers.each_mut().map(|(part, optimizer)| {
                let gradient = gradients.get(*part, step, &probe.device);
                value_after_step(optimizer, probe, *part, gradient)
            });
            Verdict::of(&parts)
        };
        let refused = |verdict: &Verdict| refuse(*verdict, &probe.path).is_err();
        steps.map(&mut step).find(refused).unwrap_or(Verdict::ElementWise)
    })
}

/// Returns a part of a probe after a step.
fn value_after_step(
    optimizer: &mut ModuleOptimizer,
    probe: &Waiting,
    part: Part,
    gradient: Tensor<2>,
) -> Vec<f32> {
    let param = Param::initialized(probe.id, Tensor::from_inner(part.value(&probe.device)));
    let module = SingleParam { path: vec![probe.path.clone()], param };
    let mut gradients = GradientsParams::new();
    gradients.register(probe.id, gradient);
    read(optimizer.step(LEARNING_RATE, module, gradients).param.base().inner())
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

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::grad_clipping::GradientClippingConfig;
    use burn::module::ParamId;
    use burn::optim;
    use burn::tensor::Device;

    use super::*;
    use crate::optim::{AdadeltaConfig, AdamConfig, AdamWConfig, SgdConfig};

    /// Number of probes with different gradients.
    const PROBES: usize = 100;

    fn verdicts(optimizer: &ModuleOptimizer) -> Vec<Verdict> {
        let (id, path) = (ParamId::new(), "weight".into());
        let probe = Waiting { id, path, device: Device::flex() };
        let verdict = |number: usize| {
            let steps = number * STEPS..(number + 1) * STEPS;
            judge(optimizer, &probe, &mut ProbeGradients::default(), steps).unwrap()
        };
        (0..PROBES).map(verdict).collect()
    }

    #[test]
    fn element_wise_optimizers_pass_with_all_gradients() {
        let by_value = || Some(GradientClippingConfig::Value(1e-6));
        let momentum = optim::momentum::MomentumConfig::new().with_nesterov(true);
        let optimizers: [(&str, ModuleOptimizer); 13] = [
            ("AdamW", optim::AdamWConfig::new().with_amsgrad(true).init()),
            ("Adam", optim::AdamConfig::new().init()),
            ("AdaGrad", optim::AdaGradConfig::new().init()),
            ("Adan", optim::AdanConfig::new().init()),
            ("Lion", optim::LionConfig::new().init()),
            ("RMSprop", optim::RmsPropConfig::new().init()),
            ("RMSprop, centered", optim::RmsPropConfig::new().with_centered(true).init()),
            ("SGD", optim::SgdConfig::new().with_momentum(Some(momentum)).init()),
            ("our AdamW", AdamWConfig::new().with_amsgrad(true).init()),
            ("our Adam", AdamConfig::new().with_weight_decay(0.1).init()),
            ("our SGD", SgdConfig::new().with_momentum(0.9).with_nesterov(true).init()),
            ("our Adadelta", AdadeltaConfig::new().with_weight_decay(0.1).init()),
            ("our AdamW by value", AdamWConfig::new().with_grad_clipping(by_value()).init()),
        ];
        for (name, optimizer) in optimizers {
            let verdicts = verdicts(&optimizer);
            let wrong = verdicts.iter().position(|verdict| *verdict != Verdict::ElementWise);
            assert_eq!(wrong, None, "{name}: {verdicts:?}");
        }
    }

    #[test]
    fn other_optimizers_are_refused_with_all_gradients() {
        let by_norm = GradientClippingConfig::Norm(1.0);
        let optimizers: [(&str, ModuleOptimizer, Verdict); 3] = [
            ("LAMB", optim::LambConfig::new().init(), Verdict::NeedsMatrix),
            ("Adafactor", optim::AdafactorConfig::new().init(), Verdict::NeedsMatrix),
            (
                "Adam by norm",
                AdamConfig::new().with_grad_clipping(Some(by_norm)).init(),
                Verdict::ClipsByNorm,
            ),
        ];
        for (name, optimizer, expected) in optimizers {
            assert_eq!(verdicts(&optimizer), [expected; PROBES], "{name}");
        }
    }
}
