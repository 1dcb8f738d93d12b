//! Learning rate schedule: linear warm-up, then a decay.

use anyhow::{Result, anyhow};
use burn::lr_scheduler::LrSchedulerConfig;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::lr_scheduler::sequential::SequentialLrSchedulerConfig;

use crate::cli::{LrScheduler, Recipe};

/// Builds the schedule of a run of `total` steps. The rate rises to its peak in the fraction of steps that
/// `--warmup` gives, and then falls towards 0, unless `--lr-scheduler constant` keeps it.
///
/// # Errors
///
/// If Burn rejects the schedule.
pub fn schedule(recipe: &Recipe, total: usize) -> Result<ModuleLrScheduler> {
    let peak = recipe.learning_rate;
    let warmup = ((total as f64 * recipe.args.warmup).ceil() as usize).max(1);
    let rise = match warmup {
        1 => LrSchedulerConfig::Constant(peak),
        _ => LinearLrSchedulerConfig::new(peak / warmup as f64, peak, warmup - 1).into(),
    };
    let steps = total.saturating_sub(warmup).max(1);
    let fall = match recipe.args.lr_scheduler {
        LrScheduler::Cosine => CosineAnnealingLrSchedulerConfig::new(peak, steps).into(),
        LrScheduler::Linear => LinearLrSchedulerConfig::new(peak, 0.0, steps).into(),
        LrScheduler::Constant => LrSchedulerConfig::Constant(peak),
    };
    SequentialLrSchedulerConfig::new(vec![rise, fall], vec![warmup])
        .init()
        .map_err(|error| anyhow!("learning rate schedule: {error}"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::Cli;

    fn rates(flags: &str, total: usize) -> Vec<f64> {
        let flags = format!("llm_finetune --learning-rate 1e-3 --warmup 0.1 {flags}");
        let recipe = Cli::parse_from(flags.split_whitespace()).recipe();
        let mut schedule = schedule(&recipe, total).unwrap();
        (0..total).map(|_| schedule.step().base()).collect()
    }

    #[test]
    fn the_rate_rises_and_falls_as_the_scheduler_says() {
        let close = |rate: f64, expected: f64| (rate - expected).abs() < 1e-9;
        for (flags, middle) in [
            ("--lr-scheduler cosine", 5e-4),
            ("--lr-scheduler linear", 5e-4),
            ("--lr-scheduler constant", 1e-3),
        ] {
            let rates = rates(flags, 100);
            assert!(close(rates[0], 1e-4) && close(rates[9], 1e-3), "{flags}");
            assert!(rates[..10].is_sorted() && rates[10..].is_sorted_by(|a, b| a >= b), "{flags}");
            assert!(close(rates[55], middle), "{flags}: {}", rates[55]);
        }
        assert!(rates("", 100)[30] > rates("--lr-scheduler linear", 100)[30], "a cosine");
    }

    #[test]
    fn a_run_of_any_length_has_a_rate_for_every_step() {
        for total in [1, 2, 3, 10, 11] {
            assert!(rates("", total).iter().all(|rate| *rate > 0.0 && *rate <= 1e-3), "{total}");
        }
    }
}
