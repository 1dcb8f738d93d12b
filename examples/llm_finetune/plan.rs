//! The plan of a step on GPUs, printed by `--plan` in place of training.

use anyhow::{Context, Result};
use fsdp_runtime::plan::{Batch, StepPlan};

use crate::cli::Cli;
use crate::common::launch_settings::LaunchSettings;
use crate::job::Model;
use crate::sharding;

/// Returns the table of the model that the arguments describe.
///
/// # Errors
///
/// If the model cannot be sharded as the arguments ask, or a page cannot be written.
pub fn text(cli: &Cli, settings: &LaunchSettings) -> Result<String> {
    let config = Model::read(cli.model.as_deref())?.config;
    let device = settings.device.resolve()?;
    let (lora, length) = (cli.lora.resolve(&[])?, cli.max_length(config.max_position_embeddings));
    let model = config.init(length, &device);
    let model = match &lora {
        Some(lora) => lora.config.apply(model).context("--lora")?,
        None => model,
    };
    let options = sharding::options(cli, settings, lora.as_ref());
    let batch =
        Batch::new(cli.training.batch_size, length).with_micro_batches(cli.training.accumulate);
    let attention = config.num_attention_heads * config.head_dim;
    cli.plan.text("llm_finetune", batch, |mesh| {
        let plan = StepPlan::new(&model, mesh, &options)?.for_gpu().with_fused_loss(true);
        // A tied embedding multiplies with every token; an embedding of its own is only looked up.
        let lookups: &[&str] = if config.tie_word_embeddings { &[] } else { &["tokens.weight"] };
        let plan = plan.with_lookups(lookups).with_attention("DecoderLayer", attention, true);
        // The embedding's output, and the input of the head.
        let plan = plan.with_activations("CausalLm", 2 * config.hidden_size, 0);
        Ok(plan.with_activations("DecoderLayer", config.activations(), config.hidden_size))
    })
}
