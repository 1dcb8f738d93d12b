//! LoRA: adapters on a frozen, pretrained model, whose weights may be stored in fewer bits.

use std::path::Path;

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use fsdp_runtime::prelude::*;
use fsdp_runtime::{LoraConfig, SaveAdapters};

use crate::common::parse::{number, positive};
use crate::export::Export;

/// Module that is trained in full beside the adapters.
const CLASSIFIER: &str = "classifier";
/// Linear layers with adapters, as in the paper of LoRA.
const TARGETS: [&str; 2] = ["query", "value"];

/// Arguments of LoRA.
#[derive(Args, Clone, Debug, Default)]
pub struct LoraArgs {
    /// Rank of LoRA adapters: the pretrained weights are frozen, and the adapters and the
    /// classifier are trained; --save-pretrained then saves these alone, in PEFT's format
    #[arg(long, value_name = "R", value_parser = positive, requires = "pretrained")]
    pub lora: Option<usize>,

    /// Numerator of the adapters' factor alpha / rank [default: twice the rank]
    #[arg(long, value_name = "ALPHA", value_parser = alpha, requires = "lora")]
    pub lora_alpha: Option<f64>,

    /// Linear layers that get adapters, by the last segments of their names [default: query,value]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', requires = "lora")]
    pub lora_targets: Vec<String>,

    /// Type in which frozen matrices are stored and sent; only with --lora
    #[arg(long, value_name = "TYPE")]
    pub quantize: Option<Quantize>,
}

/// Type in which frozen matrices are stored and sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Quantize {
    /// 4-bit NormalFloat with double quantisation, as in QLoRA
    Nf4,
    /// 8-bit integers in blocks of 64
    Int8,
    /// bfloat16
    Bf16,
}

/// Adapters of a run, and the storage type of the frozen weights.
#[derive(Clone, Debug)]
pub struct Lora {
    /// Configuration of the adapters.
    pub config: LoraConfig,
    /// Storage type of the frozen weights.
    pub storage: StorageType,
}

fn alpha(text: &str) -> Result<f64, String> {
    number(text, |alpha| alpha > 0.0 && alpha.is_finite(), "a number above 0")
}

impl LoraArgs {
    /// Returns the adapters of the run; `None` if the whole model is trained.
    ///
    /// # Errors
    ///
    /// If `--quantize` is given without `--lora`.
    pub fn resolve(&self) -> Result<Option<Lora>> {
        let Some(rank) = self.lora else {
            ensure!(
                self.quantize.is_none(),
                "--quantize stores frozen weights, and without --lora all weights are trained; add \
                 --lora 8"
            );
            return Ok(None);
        };
        let targets = match self.lora_targets.is_empty() {
            true => TARGETS.map(String::from).to_vec(),
            false => self.lora_targets.clone(),
        };
        let config = LoraConfig::new(rank)
            .with_alpha(self.lora_alpha.unwrap_or(2.0 * rank as f64))
            .with_target_modules(targets)
            .with_modules_to_save([CLASSIFIER]);
        let storage = self.quantize.map_or(StorageType::F32, |quantize| match quantize {
            Quantize::Nf4 => StorageType::NF4,
            Quantize::Int8 => StorageType::INT8,
            Quantize::Bf16 => StorageType::Bf16,
        });
        Ok(Some(Lora { config, storage }))
    }
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

    use super::*;
    use crate::cli::Cli;
    use crate::launch_settings::LaunchSettings;
    use crate::summary::Summary;
    use crate::{Outcome, run};

    fn parse(flags: &[&str]) -> Result<Cli, clap::Error> {
        Cli::try_parse_from([&["bert_finetune"], flags].concat())
    }

    fn summary(flags: &[&str]) -> Summary {
        let common = ["--quiet", "--world-size", "2", "--device", "flex", "--max-length", "24"];
        let cli = parse(&[&common, flags].concat()).unwrap();
        match run(&cli, LaunchSettings::new(&cli).unwrap()).unwrap() {
            Outcome::Finished(summary) => *summary,
            _ => panic!("the run has one process and is not interrupted"),
        }
    }

    #[test]
    fn arguments_name_the_adapters_and_the_storage_type() {
        let lora = |flags: &[&str]| parse(flags).unwrap().lora.resolve();
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
        let error = lora(&["--quantize", "nf4"]).unwrap_err().to_string();
        assert!(error.contains("--lora 8"), "{error}");
        for (flags, expected) in [
            (&["--lora", "8"][..], "--pretrained"),
            (&["--pretrained", "dir", "--lora-alpha", "8"], "--lora"),
            (&["--quantize", "int4"], "nf4, int8, bf16"),
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
