//! Learning rate schedule: linear warm-up, then the decay of `--lr-scheduler`.

use anyhow::Result;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;

use crate::cli::Recipe;

/// Builds the schedule of a run of `total` steps.
///
/// # Errors
///
/// If Burn rejects the schedule.
pub fn schedule(recipe: &Recipe, total: usize) -> Result<ModuleLrScheduler> {
    recipe.args.lr_scheduler.schedule(recipe.learning_rate, recipe.args.warmup, total)
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
