//! Learning rate schedule: linear warm-up, then linear decay.

use anyhow::Result;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;

use crate::cli::Recipe;
use crate::common::learning_rate::LrScheduler;

/// Builds the schedule of a run of `total` steps. The rate rises to its peak in the fraction of
/// steps that [`Recipe::warmup`] gives, and falls towards 0 in the remaining steps.
///
/// # Errors
///
/// If Burn rejects the schedule.
pub fn schedule(recipe: &Recipe, total: usize) -> Result<ModuleLrScheduler> {
    LrScheduler::Linear.schedule(recipe.learning_rate, recipe.warmup, total)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::Cli;

    fn rates(total: usize) -> Vec<f64> {
        let recipe = Cli::parse_from(["bert_finetune", "--learning-rate", "1e-3"]).recipe();
        let mut schedule = schedule(&recipe, total).unwrap();
        (0..total).map(|_| schedule.step().base()).collect()
    }

    #[test]
    fn the_rate_rises_for_a_tenth_and_falls_for_the_rest() {
        let rates = rates(100);
        let close = |rate: f64, expected: f64| (rate - expected).abs() < 1e-12;
        assert!(close(rates[0], 1e-4) && close(rates[9], 1e-3) && close(rates[10], 1e-3));
        assert!(rates[..10].is_sorted() && rates[10..].is_sorted_by(|a, b| a > b));
        assert!(close(rates[99], 1e-3 / 90.0));
    }

    #[test]
    fn a_run_of_any_length_has_a_rate_for_every_step() {
        for total in [1, 2, 3, 10, 11, 20, 21] {
            assert!(rates(total).iter().all(|rate| *rate > 0.0 && *rate <= 1e-3), "{total}");
        }
    }
}
