//! The plan of a step on GPUs, printed by `--plan` in place of training.

use anyhow::{Context, Result};
use fsdp_runtime::plan::{Batch, ParallelWork, StepPlan};
use fsdp_runtime::{FsdpOptions, Mesh};

use crate::cli::Cli;
use crate::common::launch_settings::LaunchSettings;
use crate::config::ModelConfig;
use crate::job::Model;
use crate::model::CausalLm;
use crate::sharding;

/// A model of the arguments, with adapters if there are any, and its options.
pub struct Planned {
    config: ModelConfig,
    model: CausalLm,
    options: FsdpOptions,
    /// Batch of a rank.
    pub batch: Batch,
}

impl Planned {
    /// Builds a model as the arguments ask. No parameter is initialised.
    ///
    /// # Errors
    ///
    /// If no linear layer has the name of an adapter's target.
    pub fn new(config: ModelConfig, cli: &Cli, settings: &LaunchSettings) -> Result<Self> {
        let device = settings.device.resolve()?.autodiff();
        let (lora, length) =
            (cli.lora.resolve(&[])?, cli.max_length(config.max_position_embeddings));
        let model = config.init(length, &device);
        let model = match &lora {
            Some(lora) => lora.config.apply(model).context("--lora")?,
            None => model,
        };
        let options = sharding::options(cli, settings, lora.as_ref());
        let batch =
            Batch::new(cli.training.batch_size, length).with_micro_batches(cli.training.accumulate);
        Ok(Self { config, model, options, batch })
    }

    /// Returns the step of the rank of `mesh`.
    ///
    /// # Errors
    ///
    /// If the model cannot be sharded as the options ask.
    pub fn step(&self, mesh: Mesh) -> Result<StepPlan> {
        let config = &self.config;
        let plan = StepPlan::new(&self.model, mesh, &self.options)?.for_gpu().with_fused_loss(true);
        // A tied embedding multiplies with every token; an embedding of its own is only looked up.
        let lookups: &[&str] = if config.tie_word_embeddings { &[] } else { &["tokens.weight"] };
        let attention = config.num_attention_heads * config.head_dim;
        let plan = plan.with_lookups(lookups).with_attention("DecoderLayer", attention, true);
        // The embedding's output, and the input of the head.
        let hidden = config.hidden_size;
        let plan = plan.with_activations("CausalLm", 2 * hidden, 0);
        let of_root = ParallelWork::new(hidden, hidden).with_exchanges(1, hidden);
        let of_layer = ParallelWork::new(2 * hidden, 2 * hidden).with_exchanges(2, hidden);
        let key_values = 2 * config.num_key_value_heads * config.head_dim;
        let plan = plan.with_parallel_work("CausalLm", of_root);
        let plan = plan.with_parallel_work("DecoderLayer", of_layer.with_key_values(key_values));
        Ok(plan.with_activations("DecoderLayer", config.activations(), config.hidden_size))
    }
}

/// Returns the table of the model that the arguments describe.
///
/// # Errors
///
/// If the model cannot be sharded as the arguments ask, or a page cannot be written.
pub fn text(cli: &Cli, settings: &LaunchSettings) -> Result<String> {
    let config = Model::read(cli.model.as_deref())?.config;
    let planned = Planned::new(config, cli, settings)?;
    cli.plan.text("llm_finetune", planned.batch, |mesh| planned.step(mesh))
}
