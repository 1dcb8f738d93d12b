//! Dynamic loss scaling, as in `torch.amp.GradScaler`, for gradients that would underflow in half
//! precision.

use burn::config::Config;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::unscale::unscale_gradients;
use crate::error::{Error, ScheduleError, ShardError};
use crate::fully_shard::Fsdp;
use crate::module::FsdpModule;

/// Configuration of [`GradScaler`], with PyTorch's defaults.
#[derive(Config, Debug, PartialEq)]
pub struct GradScalerConfig {
    /// Scale of the first step: finite, above 0. Default: 65536.
    #[config(default = 65536.0)]
    pub(crate) init_scale: f32,
    /// Factor of the scale after `growth_interval` steps without an overflow: above 1. Default: 2.
    #[config(default = 2.0)]
    pub(crate) growth_factor: f32,
    /// Factor of the scale after an overflow: between 0 and 1. Default: 0.5.
    #[config(default = 0.5)]
    pub(crate) backoff_factor: f32,
    /// Number of consecutive steps without an overflow before the scale grows, at least 1.
    /// Default: 2000.
    #[config(default = 2000)]
    pub(crate) growth_interval: u32,
}

impl GradScalerConfig {
    /// Returns a scaler for the first step.
    ///
    /// # Errors
    ///
    /// [`ShardError::InvalidOption`] names a number that is out of range.
    pub fn init(&self) -> Result<GradScaler, ShardError> {
        let wrong = |option, value: String, expected: &str| {
            Err(ShardError::InvalidOption { option, value, expected: expected.into() })
        };
        let Self { init_scale, growth_factor, backoff_factor, growth_interval } = *self;
        if !(init_scale.is_finite() && init_scale > 0.0) {
            return wrong("init_scale", init_scale.to_string(), "use a finite number above 0");
        }
        if !(growth_factor.is_finite() && growth_factor > 1.0) {
            return wrong("growth_factor", growth_factor.to_string(), "use a number above 1");
        }
        if !(backoff_factor > 0.0 && backoff_factor < 1.0) {
            let value = backoff_factor.to_string();
            return wrong("backoff_factor", value, "use a number between 0 and 1");
        }
        if growth_interval == 0 {
            return wrong("growth_interval", "0".into(), "use at least one step");
        }
        Ok(GradScaler { config: self.clone(), scale: init_scale, growth_tracker: 0 })
    }
}

/// Scales the loss up, so that gradients do not underflow in half precision, and scales the
/// gradients back down.
///
/// If a gradient overflows on any rank, no rank steps, and the scale shrinks. After
/// [`growth_interval`](GradScalerConfig) steps without an overflow, the scale grows.
///
/// Every rank creates a scaler with the same configuration. All ranks update their scales in the
/// same way, so the scales stay equal. A scaler is saved and loaded with a
/// [checkpoint](crate::checkpoint::Checkpoint::with_grad_scaler), or through serde.
///
/// ```no_run
/// # use burn::{optim::{AdamWConfig, GradientsParams, ModuleOptimizer}, tensor::Tensor};
/// # use fsdp_runtime::optim::{GradScaler, Unscaled};
/// # use fsdp_runtime::{Error, Fsdp, FsdpModule};
/// # fn step<M: FsdpModule>(
/// #     mut model: Fsdp<M>, loss: Tensor<1>, scaler: &mut GradScaler, optimizer: &mut ModuleOptimizer,
/// # ) -> Result<Fsdp<M>, Error> {
/// let gradients = model.backward(scaler.scale(loss))?;
/// match scaler.unscale(&model, gradients)? {
///     Unscaled::Finite(mut gradients) => {
///         model.clip_grad_norm(&mut gradients, 1.0)?;
///         model = optimizer.step(1e-3, model, gradients);
///     }
///     Unscaled::Overflow => println!("skipped a step; the scale is {}", scaler.loss_scale()),
/// }
/// # Ok(model)
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct GradScaler {
    config: GradScalerConfig,
    scale: f32,
    /// Number of steps since the scale last changed.
    growth_tracker: u32,
}

/// The gradients of a step after unscaling. Every rank gets the same variant.
#[derive(Debug)]
#[must_use = "the optimizer steps with finite gradients, and skips the step after an overflow"]
pub enum Unscaled {
    /// All gradients are finite on every rank. These are the gradients of the unscaled loss.
    Finite(GradientsParams),
    /// A gradient is infinite or NaN on some rank. Skip the optimizer step.
    Overflow,
}

impl Default for GradScaler {
    fn default() -> Self {
        let config = GradScalerConfig::new();
        Self { scale: config.init_scale, config, growth_tracker: 0 }
    }
}

impl GradScaler {
    /// Returns a scaler with PyTorch's defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the present scale, the factor of losses.
    pub fn loss_scale(&self) -> f32 {
        self.scale
    }

    /// Returns `loss` multiplied by the scale. Pass the result to `backward` or `accumulate` in
    /// place of `loss`.
    ///
    /// The scale does not change until [`unscale`](Self::unscale).
    pub fn scale(&self, loss: Tensor<1>) -> Tensor<1> {
        loss.mul_scalar(self.scale)
    }

    /// Divides a step's gradients by the scale, checks that they are finite on every rank, and
    /// updates the scale. Every rank calls it, once a step.
    ///
    /// It runs one small collective, of one flag and the scale.
    ///
    /// # Errors
    ///
    /// [`ScheduleError::LossScaleMismatch`] if ranks have different scales, and
    /// [`CollectiveError`](crate::errors::CollectiveError) if another rank fails or does not take part
    /// within the time-out.
    pub fn unscale<M: FsdpModule>(
        &mut self,
        model: &Fsdp<M>,
        gradients: GradientsParams,
    ) -> Result<Unscaled, Error> {
        let unscaled = self.unscale_only(model, gradients)?;
        self.update(matches!(unscaled, Unscaled::Finite(_)));
        Ok(unscaled)
    }

    /// Divides a step's gradients by the scale and checks them, without updating the scale. Every
    /// rank calls it. PyTorch's `unscale_`.
    ///
    /// Use it for a loss that depends on several sharded models: call it for each model, then call
    /// [`update`](Self::update) once, and step either all models or none.
    ///
    /// # Errors
    ///
    /// The errors of [`unscale`](Self::unscale).
    pub fn unscale_only<M: FsdpModule>(
        &self,
        model: &Fsdp<M>,
        mut gradients: GradientsParams,
    ) -> Result<Unscaled, Error> {
        let finite = unscale_gradients(&**model, &mut gradients, self.scale.recip());
        let all = model.schedule.exchange_finite(finite, self.scale)?;
        for (rank, reported) in model.mesh().world.ranks().zip(&all) {
            let (found, expected) = (reported.1, all[0].1);
            if found != expected {
                return Err(ScheduleError::LossScaleMismatch { rank, found, expected }.into());
            }
        }
        let finite = all.iter().all(|reported| reported.0);
        Ok(if finite { Unscaled::Finite(gradients) } else { Unscaled::Overflow })
    }

    /// Returns the configuration, the scale and the growth tracker, for a checkpoint.
    pub(crate) fn parts(&self) -> (&GradScalerConfig, f32, u32) {
        (&self.config, self.scale, self.growth_tracker)
    }

    /// Returns the scaler that a checkpoint describes.
    pub(crate) fn restored(
        config: GradScalerConfig,
        scale: f32,
        growth_tracker: u32,
    ) -> Result<Self, ShardError> {
        Unchecked { config, scale, growth_tracker }.try_into()
    }

    /// Updates the scale after a step; `finite` says whether all gradients were finite on every
    /// rank. [`unscale`](Self::unscale) calls it.
    pub fn update(&mut self, finite: bool) {
        if !finite {
            // A scale of 0 could never grow again.
            self.scale = (self.scale * self.config.backoff_factor).max(f32::MIN_POSITIVE);
            self.growth_tracker = 0;
            return;
        }
        self.growth_tracker += 1;
        if self.growth_tracker >= self.config.growth_interval {
            self.growth_tracker = 0;
            let grown = self.scale * self.config.growth_factor;
            if grown.is_finite() {
                self.scale = grown;
            }
        }
    }
}

/// A saved scaler whose numbers are not checked yet.
#[derive(Deserialize)]
struct Unchecked {
    config: GradScalerConfig,
    scale: f32,
    growth_tracker: u32,
}

impl TryFrom<Unchecked> for GradScaler {
    type Error = ShardError;

    fn try_from(saved: Unchecked) -> Result<Self, ShardError> {
        let Unchecked { config, scale, growth_tracker } = saved;
        config.init()?;
        // A saved scale must fulfil the conditions of the first scale.
        let Self { scale, .. } = config.clone().with_init_scale(scale).init()?;
        Ok(Self { config, scale, growth_tracker })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expects the scales of `torch.amp.GradScaler(init_scale=1024, growth_interval=3)`, computed
    /// by hand from `torch._amp_update_scale_`.
    #[test]
    fn the_scale_changes_as_in_pytorch() {
        let config = GradScalerConfig::new().with_init_scale(1024.0).with_growth_interval(3);
        let mut scaler = config.init().unwrap();
        let steps = [true, true, true, true, true, false, true, true, true, false, false];
        let scales = steps.map(|finite| {
            scaler.update(finite);
            scaler.loss_scale()
        });
        let expected =
            [1024.0, 1024.0, 2048.0, 2048.0, 2048.0, 1024.0, 1024.0, 1024.0, 2048.0, 1024.0, 512.0];
        assert_eq!(scales, expected);
    }

    #[test]
    fn the_scale_stays_finite() {
        let config = GradScalerConfig::new().with_init_scale(f32::MAX).with_growth_interval(1);
        let mut scaler = config.init().unwrap();
        scaler.update(true);
        assert_eq!(scaler.loss_scale(), f32::MAX);
    }

    #[test]
    fn the_scale_does_not_shrink_to_zero() {
        let mut scaler = GradScalerConfig::new().with_init_scale(1e-38).init().unwrap();
        for _ in 0..9 {
            scaler.update(false);
        }
        assert_eq!(scaler.loss_scale(), f32::MIN_POSITIVE);
    }
}
