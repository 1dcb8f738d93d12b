//! Learning rate schedules: linear warm-up, then a decay.

use anyhow::{Result, anyhow};
use burn::lr_scheduler::LrSchedulerConfig;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::lr_scheduler::sequential::SequentialLrSchedulerConfig;
use clap::ValueEnum;

/// How the learning rate falls after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LrScheduler {
    /// By a cosine, to 0 at the end.
    #[default]
    Cosine,
    /// Linearly, to 0 at the end.
    Linear,
    /// Not at all.
    Constant,
}

impl LrScheduler {
    /// Builds the schedule of a run of `total` steps. The rate rises to `peak` in the fraction `warmup` of the
    /// steps, and then falls as the scheduler says.
    ///
    /// # Errors
    ///
    /// If Burn rejects the schedule.
    pub fn schedule(self, peak: f64, warmup: f64, total: usize) -> Result<ModuleLrScheduler> {
        let warmup = ((total as f64 * warmup).ceil() as usize).max(1);
        let rise = match warmup {
            1 => LrSchedulerConfig::Constant(peak),
            _ => LinearLrSchedulerConfig::new(peak / warmup as f64, peak, warmup - 1).into(),
        };
        let steps = total.saturating_sub(warmup).max(1);
        let fall = match self {
            Self::Cosine => CosineAnnealingLrSchedulerConfig::new(peak, steps).into(),
            Self::Linear => LinearLrSchedulerConfig::new(peak, 0.0, steps).into(),
            Self::Constant => LrSchedulerConfig::Constant(peak),
        };
        SequentialLrSchedulerConfig::new(vec![rise, fall], vec![warmup])
            .init()
            .map_err(|error| anyhow!("learning rate schedule: {error}"))
    }
}
