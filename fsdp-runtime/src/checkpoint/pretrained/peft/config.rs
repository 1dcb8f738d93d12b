//! `adapter_config.json`: PEFT's settings of adapters.

use std::path::Path;

use serde_json::{Value, json};

use super::CONFIG;
use super::options::SaveAdapters;
use super::plan::AdapterFiles;
use crate::error::LoadError;
use crate::module::lora::LoraConfig;

/// The settings of a file that a model must agree with.
#[derive(Debug)]
pub(super) struct PeftConfig {
    /// Path of the file.
    pub(super) file: String,
    rank: usize,
    alpha: f64,
    /// Names of modules with adapters; none for every linear layer.
    target_modules: Vec<String>,
    modules_to_save: Vec<String>,
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
        let wrong = |reason| LoadError::Format {
            file: file.clone(),
            format: "PEFT configuration of LoRA adapters",
            reason,
        };
        let json: Value =
            serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        Self::parse(&json, file.clone()).map_err(wrong)
    }

    pub(super) fn parse(json: &Value, file: String) -> Result<Self, String> {
        if json["peft_type"] != "LORA" {
            return Err(format!("`peft_type` is {}, not \"LORA\"", json["peft_type"]));
        }
        for key in
            ["use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "layers_to_transform"]
        {
            let empty = match &json[key] {
                Value::Null | Value::Bool(false) => true,
                Value::Object(map) => map.is_empty(),
                Value::Array(list) => list.is_empty(),
                _ => false,
            };
            if !empty {
                return Err(format!("`{key}` is {}, which is not supported", json[key]));
            }
        }
        if !json["bias"].is_null() && json["bias"] != "none" {
            return Err(format!("`bias` is {}; only \"none\" is supported", json["bias"]));
        }
        let number = |key: &str| {
            json[key].as_f64().ok_or_else(|| format!("`{key}` is {}, not a number", json[key]))
        };
        let rank = json["r"].as_u64().and_then(|rank| usize::try_from(rank).ok());
        Ok(Self {
            rank: rank.ok_or_else(|| format!("`r` is {}, not a whole number", json["r"]))?,
            alpha: number("lora_alpha")?,
            target_modules: match json["target_modules"].as_str() {
                Some("all-linear") => Vec::new(),
                _ => list(json, "target_modules")?,
            },
            modules_to_save: list(json, "modules_to_save")?,
            file,
        })
    }

    /// Checks that the adapters of a model have the file's rank and alpha.
    ///
    /// # Errors
    ///
    /// [`LoadError::Adapters`] if not.
    pub(super) fn check(&self, plan: &AdapterFiles<'_>) -> Result<(), LoadError> {
        let (found, expected) = (self.alpha / self.rank as f64, plan.scale);
        let same_scale = (found - expected).abs() <= 1e-6 * expected.abs();
        if self.rank == plan.rank && same_scale {
            return Ok(());
        }
        let reason = format!(
            "rank {} and alpha {} in the file, rank {} and alpha {} in the model",
            self.rank,
            self.alpha,
            plan.rank,
            plan.scale * plan.rank as f64
        );
        Err(LoadError::Adapters { file: self.file.clone(), reason })
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
    /// PEFT's name `all-linear`, which leaves out the output layer, becomes a configuration without
    /// target modules, which does not. Add them where the model has an output layer.
    ///
    /// # Errors
    ///
    /// [`LoadError`] if `adapter_config.json` cannot be read, or is not of plain LoRA: DoRA,
    /// rank-stabilised LoRA, ranks that differ between modules, trained biases, and target modules
    /// as a regular expression.
    pub fn from_peft(folder: impl AsRef<Path>) -> Result<Self, LoadError> {
        let config = PeftConfig::read(folder.as_ref())?;
        Ok(Self::new(config.rank)
            .with_alpha(config.alpha)
            .with_target_modules(config.target_modules)
            .with_modules_to_save(config.modules_to_save))
    }
}

/// Returns the text of `adapter_config.json` of a model.
pub(super) fn config_text(plan: &AdapterFiles<'_>, options: &SaveAdapters) -> Vec<u8> {
    // An alpha of a whole number is written as one, as PEFT does.
    let alpha = plan.scale * plan.rank as f64;
    let alpha = match alpha.round() {
        whole if (alpha - whole).abs() < 1e-9 * whole.abs() && whole.abs() < 1e15 => {
            json!(whole as i64)
        }
        _ => json!(alpha),
    };
    let modules_to_save = (!plan.modules_to_save.is_empty()).then_some(&plan.modules_to_save);
    let config = json!({
        "peft_type": "LORA",
        "task_type": options.task_type,
        "base_model_name_or_path": options.base_model,
        "r": plan.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": plan.target_modules,
        "modules_to_save": modules_to_save,
        "bias": "none",
        "fan_in_fan_out": plan.fan_in_fan_out,
        "use_rslora": false,
        "use_dora": false,
        "inference_mode": true,
    });
    format!("{config:#}\n").into_bytes()
}
