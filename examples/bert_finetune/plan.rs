//! The plan of a step on GPUs, printed by `--plan` in place of training.

use anyhow::Result;
use fsdp_runtime::plan::{Batch, Plan};

use crate::cli::Cli;
use crate::job::Job;
use crate::launch_settings::LaunchSettings;
use crate::sharding::unsharded;

/// Matrices whose rows are looked up.
const LOOKUPS: [&str; 3] =
    ["embeddings.word.weight", "embeddings.position.weight", "embeddings.token_type.weight"];

/// Prints the plan of the model that the arguments describe.
///
/// # Errors
///
/// If the inputs cannot be read, the model cannot be sharded, or a page cannot be written.
pub fn print(cli: &Cli, settings: &LaunchSettings) -> Result<()> {
    let job = Job::new(cli, settings)?;
    let (model, options) = unsharded(&job, &settings.device.resolve()?)?;
    let (hidden, heads) = (job.config.hidden_size, job.config.num_attention_heads);
    let length = job.recipe.max_length;
    cli.plan.print("bert_finetune", Batch::new(job.recipe.batch_size, length), |mesh| {
        let plan = Plan::new(&model, mesh, &options)?.for_gpu().with_lookups(&LOOKUPS);
        let plan = plan.with_attention("BertLayer", hidden, false);
        // The attention saves its scores and its probabilities, with and without dropout.
        Ok(plan.with_activations("BertLayer", 20 * hidden + 3 * heads * length, hidden))
    })
}
