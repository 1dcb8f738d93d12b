//! Arguments of LoRA: adapters on a frozen, pretrained model, whose weights may be stored in fewer
//! bits.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use fsdp_runtime::lora::LoraConfig;
use fsdp_runtime::prelude::*;

use super::parse::{number, positive, probability};

/// Arguments of LoRA.
#[derive(Args, Clone, Debug, Default)]
pub struct LoraArgs {
    /// Rank of LoRA adapters: the pretrained weights are frozen, and the adapters and a new
    /// classifier are trained
    #[arg(long, value_name = "R", value_parser = positive, requires = "pretrained")]
    pub lora: Option<usize>,

    /// Probability of zeroing an element of an adapter's input [default: 0]
    #[arg(long, value_name = "P", value_parser = probability, requires = "lora")]
    pub lora_dropout: Option<f64>,

    /// Divide alpha by the root of the rank, in place of the rank
    #[arg(long, requires = "lora")]
    pub lora_rslora: bool,

    /// Layers whose adapters have another rank, such as value=4,up=16
    #[arg(long, value_name = "NAME=R", value_delimiter = ',', value_parser = named_rank, requires = "lora")]
    pub lora_ranks: Vec<(String, usize)>,

    /// Numerator of the adapters' factor alpha / rank [default: twice the rank]
    #[arg(long, value_name = "ALPHA", value_parser = alpha, requires = "lora")]
    pub lora_alpha: Option<f64>,

    /// Layers whose adapters have another alpha, such as value=8,up=32
    #[arg(long, value_name = "NAME=ALPHA", value_delimiter = ',', value_parser = named_alpha, requires = "lora")]
    pub lora_alphas: Vec<(String, f64)>,

    /// Linear layers that get adapters, by the last segments of their names, or all-linear [default:
    /// query,value; all-linear for models of the Llama family]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', requires = "lora")]
    pub lora_targets: Vec<String>,

    /// Numbers of the blocks whose layers get adapters, such as 0,1 [default: all]
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', requires = "lora")]
    pub lora_layers: Vec<usize>,

    /// Linear layers that get no adapters, by the last segments of their names
    #[arg(long, value_name = "NAMES", value_delimiter = ',', requires = "lora")]
    pub lora_exclude: Vec<String>,

    /// Modules that are trained and saved whole beside the adapters, by the last segments of their names
    #[arg(long, value_name = "NAMES", value_delimiter = ',', requires = "lora")]
    pub lora_modules_to_save: Vec<String>,

    /// Directory of adapters to start from, in PEFT's format: `adapter_config.json` and
    /// `adapter_model.safetensors`. They are trained on, in place of new ones of --lora
    #[arg(long, value_name = "DIR", requires = "pretrained", conflicts_with = "lora")]
    pub adapters: Option<PathBuf>,

    /// Type in which frozen matrices are stored and sent; only with --lora or --adapters
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

/// Loads the adapters to start from. Every rank calls it.
///
/// # Errors
///
/// If the files cannot be read or do not fit the model, or if a peer fails.
pub fn load_adapters<M: FsdpModule>(model: &mut Fsdp<M>, folder: &Path) -> Result<()> {
    let loaded = model.state_mut().load_adapters(folder);
    loaded.with_context(|| format!("cannot start from {}", folder.display()))?;
    Ok(())
}

fn alpha(text: &str) -> Result<f64, String> {
    number(text, |alpha| alpha > 0.0 && alpha.is_finite(), "a number above 0")
}

fn named_rank(text: &str) -> Result<(String, usize), String> {
    let (name, rank) = named(text).ok_or("expected a name and a rank, such as value=4")?;
    Ok((name, positive(rank)?))
}

fn named_alpha(text: &str) -> Result<(String, f64), String> {
    let (name, number) = named(text).ok_or("expected a name and an alpha, such as value=8")?;
    Ok((name, alpha(number)?))
}

fn named(text: &str) -> Option<(String, &str)> {
    let (name, value) = text.split_once('=').filter(|(name, _)| !name.is_empty())?;
    Some((name.to_string(), value))
}

impl LoraArgs {
    /// Returns whether adapters are trained.
    pub fn is_on(&self) -> bool {
        self.lora.is_some() || self.adapters.is_some()
    }

    /// Returns the adapters of the run; `None` if the whole model is trained. Without
    /// `--lora-targets`, the linear layers `targets` get adapters, as in the paper of LoRA.
    ///
    /// # Errors
    ///
    /// If `--quantize` is given without `--lora` and `--adapters`, or if the configuration of
    /// `--adapters` cannot be read.
    pub fn resolve(&self, targets: &[&str]) -> Result<Option<Lora>> {
        let config = match (&self.adapters, self.lora) {
            (Some(folder), _) => LoraConfig::from_peft(folder).context("--adapters")?,
            (None, Some(rank)) => self.config(rank, targets),
            (None, None) => {
                ensure!(
                    self.quantize.is_none(),
                    "--quantize stores frozen weights, and without --lora all weights are trained; \
                     add --lora 8"
                );
                return Ok(None);
            }
        };
        let storage = self.quantize.map_or(StorageType::F32, |quantize| match quantize {
            Quantize::Nf4 => StorageType::NF4,
            Quantize::Int8 => StorageType::INT8,
            Quantize::Bf16 => StorageType::Bf16,
        });
        Ok(Some(Lora { config, storage }))
    }

    /// Returns the configuration of new adapters.
    fn config(&self, rank: usize, targets: &[&str]) -> LoraConfig {
        let targets = match self.lora_targets.is_empty() {
            true => targets.iter().map(|name| name.to_string()).collect(),
            false => self.lora_targets.clone(),
        };
        LoraConfig::new(rank)
            .with_alpha(self.lora_alpha.unwrap_or(2.0 * rank as f64))
            .with_dropout(self.lora_dropout.unwrap_or(0.0))
            .with_rslora(self.lora_rslora)
            .with_rank_pattern(self.lora_ranks.clone())
            .with_alpha_pattern(self.lora_alphas.clone())
            .with_target_modules(targets)
            .with_excluded_modules(self.lora_exclude.clone())
            .with_modules_to_save(self.lora_modules_to_save.clone())
            .with_layers_to_transform(self.lora_layers.clone())
    }
}
