//! LoRA: adapters on a frozen, pretrained model, whose weights may be stored in fewer bits.

use std::path::Path;

use anyhow::Result;
use fsdp_runtime::pretrained::SaveAdapters;

use crate::common::lora::{Lora, LoraArgs};
use crate::export::Export;

/// Module that is trained in full beside the adapters.
const CLASSIFIER: &str = "classifier";
/// Name of a head in PEFT's configuration of classifiers.
const SCORE: &str = "score";
/// Linear layers with adapters, as in the paper of LoRA.
const TARGETS: [&str; 2] = ["query", "value"];

/// Returns the adapters of the run; `None` if the whole model is trained.
///
/// # Errors
///
/// If `--quantize` is given without adapters, or if the configuration of `--adapters` cannot be read.
pub fn resolve(args: &LoraArgs) -> Result<Option<Lora>> {
    let lora = args.resolve(&TARGETS)?;
    Ok(lora.map(|lora| {
        // PEFT also names `score`, the head of other models.
        let others = lora.config.modules_to_save().iter().filter(|name| *name != SCORE);
        let mut modules: Vec<String> = others.cloned().collect();
        if !modules.iter().any(|name| name == CLASSIFIER) {
            modules.push(CLASSIFIER.into());
        }
        Lora { config: lora.config.with_modules_to_save(modules), ..lora }
    }))
}

/// Returns the options to save adapters with. PEFT reads the model's configuration from the
/// directory of the base model, and the tokenizer from that of the adapters.
pub fn save_options(export: &Export, base: Option<&Path>) -> SaveAdapters {
    let mut options = SaveAdapters::new().with_task_type("SEQ_CLS");
    if let Some(base) = base {
        options = options.with_base_model(base.display().to_string());
    }
    let tokenizer = export.files.iter().filter(|(name, _)| name != "config.json").cloned();
    tokenizer.fold(options, |options, (name, contents)| options.with_file(name, contents))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use fsdp_runtime::lora::LoraConfig;
    use fsdp_runtime::prelude::*;

    use super::*;
    use crate::cli::Cli;
    use crate::summary::Summary;
    use crate::{Outcome, run};

    fn parse(flags: &[&str]) -> Result<Cli, clap::Error> {
        Cli::try_parse_from([&["bert_finetune"], flags].concat())
    }

    fn summary(flags: &[&str]) -> Summary {
        let common = ["--quiet", "--world-size", "2", "--device", "flex", "--max-length", "24"];
        let cli = parse(&[&common, flags].concat()).unwrap();
        match run(&cli, cli.launch_settings().unwrap()).unwrap() {
            Outcome::Finished(summary) => *summary,
            _ => panic!("the run has one process and is not interrupted"),
        }
    }

    #[test]
    fn arguments_name_the_adapters_and_the_storage_type() {
        let lora = |flags: &[&str]| resolve(&parse(flags).unwrap().lora);
        assert!(lora(&[]).unwrap().is_none());
        let plain = lora(&["--pretrained", "dir", "--lora", "8"]).unwrap().unwrap();
        assert_eq!((plain.config.rank(), plain.config.alpha()), (8, 16.0));
        assert_eq!(plain.config.target_modules(), TARGETS);
        assert_eq!(plain.storage, StorageType::F32);
        let flags = ["--pretrained", "dir", "--lora", "4", "--lora-alpha", "3"];
        let more = ["--lora-targets", "query,up", "--quantize", "int8"];
        let all = lora(&[&flags[..], &more].concat()).unwrap().unwrap();
        assert_eq!(all.config.alpha(), 3.0);
        assert_eq!(all.config.target_modules(), ["query", "up"]);
        assert_eq!(all.storage, StorageType::INT8);
        let more = ["--lora-dropout", "0.1", "--lora-rslora", "--lora-ranks", "up=2,value=6"];
        let set = lora(&[&flags[..], &more].concat()).unwrap().unwrap().config;
        assert_eq!((set.dropout(), set.rslora()), (0.1, true));
        assert_eq!(set.rank_pattern(), [("up".to_string(), 2), ("value".to_string(), 6)]);
        let more = [
            "--lora-alphas",
            "up=3",
            "--lora-exclude",
            "value",
            "--lora-modules-to-save",
            "pooler",
        ];
        let set = lora(&[&flags[..], &more].concat()).unwrap().unwrap().config;
        assert_eq!(set.alpha_pattern(), [("up".to_string(), 3.0)]);
        assert_eq!(set.excluded_modules(), ["value"]);
        assert_eq!(set.modules_to_save(), ["pooler", "classifier"]);
        let error = lora(&["--quantize", "nf4"]).unwrap_err().to_string();
        assert!(error.contains("--lora 8"), "{error}");
        for (flags, expected) in [
            (&["--lora", "8"][..], "--pretrained"),
            (&["--pretrained", "dir", "--lora-alpha", "8"], "--lora"),
            (&["--quantize", "int4"], "nf4, int8, bf16"),
            (&["--pretrained", "dir", "--lora", "8", "--lora-ranks", "up"], "such as value=4"),
            (&["--pretrained", "dir", "--lora", "8", "--lora-alphas", "up=0"], "a number above 0"),
        ] {
            let message = parse(flags).unwrap_err().to_string();
            assert!(message.contains(expected), "{flags:?}: {message}");
        }
    }

    #[test]
    fn adapters_are_trained_on_a_quantised_model_and_saved_alone() {
        let home = tempfile::tempdir().unwrap();
        let path = |name: &str| home.path().join(name).to_str().unwrap().to_string();
        let (base, adapters) = (path("base"), path("adapters"));
        summary(&["--steps", "2", "--save-pretrained", &base]);
        let flags = ["--pretrained", &base, "--lora", "2", "--steps", "3"];
        let plain = summary(&flags);
        let more = ["--quantize", "nf4", "--save-pretrained", &adapters];
        let coded = summary(&[&flags[..], &more].concat());
        assert_eq!(coded.num_params, plain.num_params);
        let (coded_bytes, bytes) = (coded.sharded_bytes_per_rank, plain.sharded_bytes_per_rank);
        assert!(4 * coded_bytes < bytes, "{coded_bytes} {bytes}");
        let (coded_bytes, bytes) = (coded.sent_bytes_per_step, plain.sent_bytes_per_step);
        assert!(coded_bytes > 0 && 4 * coded_bytes < bytes, "{coded_bytes} {bytes}");
        assert_ne!(coded.losses, plain.losses, "4 bits round");
        for (coded, plain) in coded.losses.iter().zip(&plain.losses) {
            assert!((coded - plain).abs() < 0.1, "{coded} {plain}");
        }
        let mut names: Vec<_> = std::fs::read_dir(&adapters)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(
            names,
            [
                "adapter_config.json",
                "adapter_model.safetensors",
                "tokenizer.json",
                "tokenizer_config.json",
                "vocab.txt"
            ]
        );
        let config = LoraConfig::from_peft(&adapters).unwrap();
        assert_eq!(config.target_modules(), ["query", "value"]);
        assert_eq!(config.modules_to_save(), ["classifier"]);
    }
}
