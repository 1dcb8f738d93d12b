//! The plan of a step on GPUs, printed by `--plan` in place of training.

use anyhow::Result;
use fsdp_runtime::plan::{Batch, StepPlan};

use crate::cli::Cli;
use crate::common::launch_settings::LaunchSettings;
use crate::job::Job;
use crate::sharding::unsharded;

/// Matrices whose rows are looked up.
const LOOKUPS: [&str; 3] =
    ["embeddings.word.weight", "embeddings.position.weight", "embeddings.token_type.weight"];

/// Returns the table of the model that the arguments describe.
///
/// # Errors
///
/// If the inputs cannot be read, the model cannot be sharded, or a page cannot be written.
pub fn text(cli: &Cli, settings: &LaunchSettings) -> Result<String> {
    let job = Job::new(cli, settings)?;
    let (model, options) = unsharded(&job, &settings.device.resolve()?.autodiff())?;
    let (hidden, heads) = (job.config.hidden_size, job.config.num_attention_heads);
    let length = job.recipe.max_length;
    cli.plan.text("bert_finetune", Batch::new(job.recipe.batch_size, length), |mesh| {
        let plan = StepPlan::new(&model, mesh, &options)?.for_gpu().with_lookups(&LOOKUPS);
        let plan = plan.with_attention("BertLayer", hidden, false);
        // The attention saves its scores and its probabilities, with and without dropout.
        Ok(plan.with_activations("BertLayer", 20 * hidden + 3 * heads * length, hidden))
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::common::plan::check_table;

    fn text_of(flags: &[&str]) -> Result<String> {
        let cli = Cli::parse_from([&["bert_finetune"], flags].concat());
        text(&cli, &cli.launch_settings()?)
    }

    #[test]
    fn a_plan_has_a_row_for_each_number_of_ranks_and_a_page() {
        let folder = tempfile::tempdir().unwrap();
        let page = folder.path().join("plan.html");
        let text = text_of(&["--plan", "2,8", "--plan-html", page.to_str().unwrap()]).unwrap();
        check_table(&text, "bert_finetune");
        let page = std::fs::read_to_string(page).unwrap();
        assert!(page.contains("bert_finetune") && page.contains("<svg"), "{page}");
    }

    #[test]
    fn an_unknown_device_is_an_error_with_those_that_are_known() {
        let error = text_of(&["--plan", "8", "--plan-device", "abacus"]).unwrap_err();
        let said = format!("{error:#}");
        assert!(["--plan-device", "abacus", "h100"].iter().all(|it| said.contains(it)), "{said}");
    }
}
