//! `adapter_config.json`: PEFT's settings of adapters.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use super::CONFIG;
use super::options::SaveAdapters;
use super::ordered::Ordered;
use super::plan::{AdapterFiles, PlannedAdapter};
use super::refused::{Refused, refused};
use super::shares::{Shares, number};
use crate::error::LoadError;
use crate::module::lora::{LoraConfig, Scales};

/// The settings of a file that a model must agree with.
#[derive(Debug)]
pub(super) struct PeftConfig {
    /// Path of the file.
    pub(super) file: String,
    lora: LoraConfig,
    scales: Scales,
}

/// The settings whose order counts: the first pattern that matches a layer is the layer's.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Patterns {
    rank_pattern: Ordered,
    alpha_pattern: Ordered,
}

impl PeftConfig {
    /// Reads the file in `folder`.
    ///
    /// # Errors
    ///
    /// [`LoadError`] if the file cannot be read, or describes anything but plain LoRA.
    pub(super) fn read(folder: &Path) -> Result<Self, LoadError> {
        let path = folder.join(CONFIG);
        let file = path.display().to_string();
        let text = std::fs::read(&path)
            .map_err(|error| LoadError::Io { file: file.clone(), reason: error.to_string() })?;
        Self::parse(&text, file)
    }

    /// Reads the text of the file with the path `file`.
    pub(super) fn parse(text: &[u8], file: String) -> Result<Self, LoadError> {
        let format = "PEFT configuration of LoRA adapters";
        let wrong = |reason| LoadError::Format { file: file.clone(), format, reason };
        let json: Value = serde_json::from_slice(text).map_err(|error| wrong(error.to_string()))?;
        let settings = json.as_object().ok_or_else(|| wrong("it is no object".into()))?;
        if let Some(Refused { setting, reason }) = refused(settings) {
            let value = json[&setting].to_string();
            let file = file.clone();
            return Err(LoadError::Setting { file, setting, value, reason: reason.into() });
        }
        let patterns: Patterns = serde_json::from_slice(text).map_err(|error| {
            wrong(format!("`rank_pattern` or `alpha_pattern` is no object: {error}"))
        })?;
        let lora = lora_config(&json, patterns).map_err(wrong)?;
        let scales = Scales::new(&lora).map_err(|error| wrong(error.to_string()))?;
        Ok(Self { file, lora, scales })
    }

    /// Checks that the adapters of a model have the file's ranks and scales.
    ///
    /// # Errors
    ///
    /// [`LoadError::Adapters`] if not.
    pub(super) fn check(&self, plan: &AdapterFiles<'_>) -> Result<(), LoadError> {
        for PlannedAdapter { names, rank, alpha, factor } in &plan.adapters {
            let found = self.scales.of(&[names.path, names.key]);
            if found.rank == *rank && (found.factor - factor).abs() <= 1e-6 * factor.abs() {
                continue;
            }
            let stabilised = |is: bool| if is { " by the root of the rank" } else { "" };
            let reason = format!(
                "`{}` has rank {} and alpha {} in the file{}, and rank {rank} and alpha {alpha} in the \
                 model{}",
                names.key,
                found.rank,
                found.alpha,
                stabilised(self.lora.rslora()),
                stabilised(plan.rank_stabilised),
            );
            return Err(LoadError::Adapters { file: self.file.clone(), reason });
        }
        Ok(())
    }
}

/// Returns the configuration that a file describes.
fn lora_config(json: &Value, patterns: Patterns) -> Result<LoraConfig, String> {
    let wrong = |key: &str, expected| format!("`{key}` is {}, not {expected}", json[key]);
    let alpha = json["lora_alpha"].as_f64().ok_or_else(|| wrong("lora_alpha", "a number"))?;
    let dropout = match &json["lora_dropout"] {
        Value::Null => Some(0.0),
        dropout => dropout.as_f64().filter(|dropout| (0.0..1.0).contains(dropout)),
    };
    let dropout = dropout.ok_or_else(|| wrong("lora_dropout", "a number of 0 or more below 1"))?;
    let rslora = match &json["use_rslora"] {
        Value::Null => Some(false),
        rslora => rslora.as_bool(),
    };
    let rslora = rslora.ok_or_else(|| wrong("use_rslora", "true or false"))?;
    let rank = whole(&json["r"]).ok_or_else(|| wrong("r", "a whole number"))?;
    let config = LoraConfig::new(rank);
    let config = match json["target_modules"].as_str() {
        Some(name) if name.eq_ignore_ascii_case("all-linear") => config.with_target_modules([name]),
        Some(pattern) => config.with_target_pattern(pattern),
        None => config.with_target_modules(list(json, "target_modules")?),
    };
    let config = match json["exclude_modules"].as_str() {
        Some(pattern) => config.with_excluded_pattern(pattern),
        None => config.with_excluded_modules(list(json, "exclude_modules")?),
    };
    Ok(config
        .with_alpha(alpha)
        .with_dropout(dropout)
        .with_rslora(rslora)
        .with_rank_pattern(patterns.rank_pattern.values("rank_pattern", whole)?)
        .with_alpha_pattern(patterns.alpha_pattern.values("alpha_pattern", Value::as_f64)?)
        .with_layers_to_transform(numbers(json, "layers_to_transform")?)
        .with_layers_pattern(names(json, "layers_pattern")?)
        .with_modules_to_save(list(json, "modules_to_save")?))
}

fn whole(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|value| usize::try_from(value).ok())
}

/// Returns a list of whole numbers, or one; it may be missing.
fn numbers(json: &Value, key: &str) -> Result<Vec<usize>, String> {
    let numbers = match &json[key] {
        Value::Null => Some(Vec::new()),
        Value::Array(numbers) => numbers.iter().map(whole).collect(),
        number => whole(number).map(|number| vec![number]),
    };
    numbers.ok_or_else(|| format!("`{key}` is {}, not a list of whole numbers", json[key]))
}

/// Returns a list of names, or one; it may be missing.
fn names(json: &Value, key: &str) -> Result<Vec<String>, String> {
    match json[key].as_str() {
        Some("") => Ok(Vec::new()),
        Some(name) => Ok(vec![name.to_string()]),
        None => list(json, key),
    }
}

/// Returns a list of names, which may be missing.
fn list(json: &Value, key: &str) -> Result<Vec<String>, String> {
    if json[key].is_null() {
        return Ok(Vec::new());
    }
    let names = json[key].as_array().and_then(|names| {
        names.iter().map(|name| name.as_str().map(str::to_string)).collect::<Option<Vec<_>>>()
    });
    names.ok_or_else(|| format!("`{key}` is {}, not a list of names", json[key]))
}

impl LoraConfig {
    /// Reads the configuration of adapters that PEFT, or
    /// [`State::save_adapters`](crate::checkpoint::State::save_adapters), has saved in `folder`.
    /// [`StateMut::load_adapters`](crate::checkpoint::StateMut::load_adapters) then loads them.
    ///
    /// # Errors
    ///
    /// [`LoadError`] if `adapter_config.json` cannot be read. [`LoadError::Setting`] names a setting that
    /// has no equivalent here: DoRA and other types of adapters, trained biases, an initialisation
    /// that changes the base, and settings that are unknown and not empty.
    pub fn from_peft(folder: impl AsRef<Path>) -> Result<Self, LoadError> {
        Ok(PeftConfig::read(folder.as_ref())?.lora)
    }
}

/// Returns the text of `adapter_config.json` of a model.
pub(super) fn config_text(plan: &AdapterFiles<'_>, options: &SaveAdapters) -> Vec<u8> {
    let adapters = || plan.adapters.iter();
    let ranks = Shares::new(adapters().map(|it| (it.names.key, it.rank as f64)));
    let alphas = Shares::new(adapters().map(|it| (it.names.key, it.alpha)));
    let modules_to_save = (!plan.modules_to_save.is_empty()).then_some(&plan.modules_to_save);
    let config = json!({
        "peft_type": "LORA",
        "task_type": options.task_type,
        "base_model_name_or_path": options.base_model,
        "r": number(ranks.common),
        "lora_alpha": number(alphas.common),
        "lora_dropout": plan.dropout,
        "rank_pattern": ranks.patterns(),
        "alpha_pattern": alphas.patterns(),
        "target_modules": plan.target_modules,
        "modules_to_save": modules_to_save,
        "bias": "none",
        "fan_in_fan_out": plan.fan_in_fan_out,
        "use_rslora": plan.rank_stabilised,
        "use_dora": false,
        "inference_mode": true,
    });
    format!("{config:#}\n").into_bytes()
}
