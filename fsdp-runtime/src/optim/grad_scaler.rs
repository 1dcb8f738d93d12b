//! Dynamic loss scaling, as `torch.amp.GradScaler`: for gradients that underflow in half precision.

use burn::config::Config;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::error::{Error, ScheduleError, ShardError};
use crate::fully_shard::Fsdp;
use crate::module::FsdpModule;
use crate::optim::unscale::unscale_gradients;

/// Configuration of [`GradScaler`], with PyTorch's defaults.
#[derive(Config, Debug, PartialEq)]
pub struct GradScalerConfig {
    /// The scale of the first step, above 0.
    #[config(default = 65536.0)]
    pub(crate) init_scale: f32,
    /// What the scale is multiplied by after `growth_interval` steps without an overflow, above 1.
    #[config(default = 2.0)]
    pub(crate) growth_factor: f32,
    /// What the scale is multiplied by after an overflow, between 0 and 1.
    #[config(default = 0.5)]
    pub(crate) backoff_factor: f32,
    /// Steps in a row without an overflow until the scale grows, at least 1.
    #[config(default = 2000)]
    pub(crate) growth_interval: u32,
}

impl GradScalerConfig {
    /// A scaler at its first step.
    ///
    /// # Errors
    ///
    /// [`ShardError::InvalidOption`] for a number out of its range.
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

/// Scales the loss up, so that gradients do not underflow in half precision, and the gradients down
/// again. Where they overflowed, on whatever rank, no rank steps, and the scale shrinks; after enough
/// steps without, it grows.
///
/// Every rank has one of its own, made alike: they stay alike. It is its own state, and is saved and
/// loaded with a [checkpoint](crate::checkpoint::Checkpoint::with_grad_scaler), or through serde.
///
/// ```no_run
/// # use burn::{optim::{AdamWConfig, GradientsParams, ModuleOptimizer}, tensor::Tensor};
/// # use fsdp_runtime::{Error, Fsdp, FsdpModule, GradScaler, Unscaled};
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
    /// Steps since the scale last changed.
    growth_tracker: u32,
}

/// What a step's gradients turned out to be, the same on every rank.
#[derive(Debug)]
#[must_use = "the optimizer steps with finite gradients, and skips the step after an overflow"]
pub enum Unscaled {
    /// The gradients of the loss as it was before it was scaled.
    Finite(GradientsParams),
    /// A gradient was infinite or NaN on some rank. There is nothing to step with.
    Overflow,
}

impl Default for GradScaler {
    fn default() -> Self {
        let config = GradScalerConfig::new();
        Self { scale: config.init_scale, config, growth_tracker: 0 }
    }
}

impl GradScaler {
    /// A scaler with PyTorch's defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// What losses are multiplied by at present.
    pub fn loss_scale(&self) -> f32 {
        self.scale
    }

    /// The loss to call `backward` or `accumulate` with, in place of `loss`. The scale stays the same
    /// until [`unscale`](Self::unscale).
    pub fn scale(&self, loss: Tensor<1>) -> Tensor<1> {
        loss.mul_scalar(self.scale)
    }

    /// Divides a step's gradients by the scale, checks that they are finite on every rank, and
    /// updates the scale. Every rank calls it, once a step. One all-reduce, of one flag.
    ///
    /// # Errors
    ///
    /// [`ScheduleError::LossScaleMismatch`] where ranks have different scales, and
    /// [`CollectiveError`](crate::CollectiveError) when a rank does not come.
    pub fn unscale<M: FsdpModule>(
        &mut self,
        model: &Fsdp<M>,
        gradients: GradientsParams,
    ) -> Result<Unscaled, Error> {
        let unscaled = self.unscale_only(model, gradients)?;
        self.update(matches!(unscaled, Unscaled::Finite(_)));
        Ok(unscaled)
    }

    /// [`unscale`](Self::unscale) that leaves the scale as it is, for a loss that goes through several
    /// sharded models: call it for each of them, then [`update`](Self::update) once, and step all of
    /// them or none. PyTorch's `unscale_`.
    ///
    /// # Errors
    ///
    /// As [`unscale`](Self::unscale).
    pub fn unscale_only<M: FsdpModule>(
        &self,
        model: &Fsdp<M>,
        mut gradients: GradientsParams,
    ) -> Result<Unscaled, Error> {
        let finite = unscale_gradients(&**model, &mut gradients, self.scale.recip());
        let all = model.engine.exchange_finite(finite, self.scale)?;
        for (rank, told) in model.mesh().world.ranks().zip(&all) {
            let (found, expected) = (told.1, all[0].1);
            if found != expected {
                return Err(ScheduleError::LossScaleMismatch { rank, found, expected }.into());
            }
        }
        let finite = all.iter().all(|told| told.0);
        Ok(if finite { Unscaled::Finite(gradients) } else { Unscaled::Overflow })
    }

    /// Returns the configuration, the scale and the growth tracker, which a checkpoint holds.
    pub(crate) fn parts(&self) -> (&GradScalerConfig, f32, u32) {
        (&self.config, self.scale, self.growth_tracker)
    }

    /// Returns the scaler that a checkpoint holds.
    pub(crate) fn restored(
        config: GradScalerConfig,
        scale: f32,
        growth_tracker: u32,
    ) -> Result<Self, ShardError> {
        Unchecked { config, scale, growth_tracker }.try_into()
    }

    /// Moves on to the scale of the next step, after one whose gradients were all `finite`, on every
    /// rank, or were not. [`unscale`](Self::unscale) has done so.
    pub fn update(&mut self, finite: bool) {
        if !finite {
            // Never 0, which no loss comes back from.
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

/// A saved scaler, before its numbers are checked.
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
        // A saved scale is held to what a first one is.
        let Self { scale, .. } = config.clone().with_init_scale(scale).init()?;
        Ok(Self { config, scale, growth_tracker })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The scales that `torch.amp.GradScaler(init_scale=1024, growth_interval=3)` goes through, worked
    /// out by hand from `torch._amp_update_scale_`.
    #[test]
    fn the_scale_moves_as_pytorchs() {
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
    fn the_scale_does_not_grow_beyond_what_is_finite() {
        let config = GradScalerConfig::new().with_init_scale(f32::MAX).with_growth_interval(1);
        let mut scaler = config.init().unwrap();
        scaler.update(true);
        assert_eq!(scaler.loss_scale(), f32::MAX);
    }

    #[test]
    fn the_scale_does_not_shrink_to_nothing() {
        let mut scaler = GradScalerConfig::new().with_init_scale(1e-38).init().unwrap();
        for _ in 0..9 {
            scaler.update(false);
        }
        assert_eq!(scaler.loss_scale(), f32::MIN_POSITIVE);
        assert_eq!(GradScaler::from_scalars(&scaler.scalars()), Ok(scaler));
    }
}
