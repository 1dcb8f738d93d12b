//! The plan of a step on GPUs, printed by `--plan` in place of training.

use anyhow::Result;
use fsdp_runtime::plan::{Batch, Plan};

use crate::arch::Arch;
use crate::cli::Cli;
use crate::job::Setup;

/// Prints the plan of the model that the arguments describe.
///
/// # Errors
///
/// If the model cannot be sharded as the arguments ask, or a page cannot be written.
pub fn print(cli: &Cli) -> Result<()> {
    let setup = Setup::new(cli)?;
    let device = cli.ranks.device.resolve()?;
    let model = setup.model(&device)?;
    let Arch { width, heads, .. } = setup.arch;
    let batches = setup.recipe.update_freq.first().copied().unwrap_or(1);
    let batch = Batch::new(setup.recipe.batch_size, setup.recipe.tokens_per_sample)
        .with_micro_batches(batches);
    cli.plan.print("gpt_pretrain", batch, |mesh| {
        let plan = Plan::new(&model, mesh, &setup.options())?.for_gpu();
        // The token embedding is tied to the output weight, which multiplies with every token.
        let plan = plan.with_lookups(&["positions.weight"]).with_fused_loss(true);
        let plan = plan.with_attention("Block", width, true);
        Ok(plan.with_activations("Block", 20 * width + heads, width))
    })
}
