//! The plan of a step on GPUs, printed by `--plan` in place of training.

use anyhow::Result;
use fsdp_runtime::plan::{Batch, ParallelWork, StepPlan};

use crate::arch::Arch;
use crate::cli::Cli;
use crate::job::Setup;

/// Returns the table of the model that the arguments describe.
///
/// # Errors
///
/// If the model cannot be sharded as the arguments ask, or a page cannot be written.
pub fn text(cli: &Cli) -> Result<String> {
    let setup = Setup::new(cli)?;
    let device = cli.ranks.device.resolve()?.autodiff();
    let model = setup.model(&device)?;
    let Arch { width, heads, .. } = setup.arch;
    let batches = setup.recipe.update_freq.first().copied().unwrap_or(1);
    let batch = Batch::new(setup.recipe.batch_size, setup.recipe.tokens_per_sample)
        .with_micro_batches(batches);
    cli.plan.text("gpt_pretrain", batch, |mesh| {
        let plan = StepPlan::new(&model, mesh, &setup.options())?.for_gpu();
        // The token embedding is tied to the output weight, which multiplies with every token.
        let plan = plan.with_lookups(&["positions.weight"]).with_fused_loss(true);
        let plan = plan.with_attention("Block", width, true);
        // Of a block, the inputs of both norms, and what dropout and residuals keep, are whole on each tensor
        // parallel rank, as are the inputs of the split layers.
        let parallel = ParallelWork::new(4 * width, 2 * width)
            .with_exchanges(2, width)
            .with_key_values(2 * width);
        let plan = plan.with_parallel_work("Block", parallel);
        Ok(plan.with_activations("Block", 20 * width + heads, width))
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::common::plan::check_table;

    fn text_of(flags: &[&str]) -> String {
        text(&Cli::parse_from([&["gpt_pretrain"], flags].concat())).unwrap()
    }

    #[test]
    fn a_plan_has_a_row_for_each_number_of_ranks() {
        check_table(&text_of(&["--plan", "2,8", "--arch", "small"]), "gpt_pretrain");
    }

    /// Returns GiB of a rank.
    fn memory(flags: &[&str]) -> f64 {
        let arguments = ["--plan", "8", "--arch", "small", "--batch-size", "8"];
        let text = text_of(&[&arguments, flags].concat());
        let row = text.lines().rfind(|line| !line.is_empty()).unwrap();
        let cells: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(cells[0], "8", "{text}");
        cells[4].parse().unwrap()
    }

    #[test]
    fn parts_of_matrices_and_samples_take_less_memory() {
        let whole = memory(&[]);
        let [split, rows] = [&["--tp", "2"], &["--cp", "2"]].map(|flags| memory(flags));
        assert!(split < whole && rows < 0.7 * whole, "{whole} {split} {rows}");
    }

    #[test]
    fn micro_batches_are_tokens_of_a_rank() {
        let text = text_of(&["--plan", "2", "--batch-size", "3", "--update-freq", "4"]);
        assert!(text.contains(": 12 samples of "), "{text}");
    }
}
