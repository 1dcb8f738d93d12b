//! Settings of PEFT that change results and have no equivalent here.

use serde_json::{Map, Value};

/// Settings that [`PeftConfig`](super::config::PeftConfig) reads.
const READ: [&str; 14] = [
    "peft_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
    "bias",
    "init_lora_weights",
];
/// Settings that change no result, or only together with a setting that is refused. The orientation of
/// matrices, `fan_in_fan_out`, is that of the model.
const WITHOUT_EFFECT: [&str; 10] = [
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "fan_in_fan_out",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
];
/// Initialisations that neither change the base nor freeze a factor.
const INITIALISATIONS: [&str; 2] = ["gaussian", "orthogonal"];

/// What is refused: a setting, and the reason.
#[derive(Debug, PartialEq)]
pub(super) struct Refused {
    pub(super) setting: String,
    pub(super) reason: &'static str,
}

/// Returns the first setting that is refused. A setting that is unknown, and has a value other than
/// `null`, `false` or an empty one, is refused too.
pub(super) fn refused(settings: &Map<String, Value>) -> Option<Refused> {
    let value = |name: &str| settings.get(name).unwrap_or(&Value::Null);
    let refuse = |setting: &str, reason| Some(Refused { setting: setting.to_string(), reason });
    if value("peft_type") != "LORA" {
        return refuse("peft_type", "only adapters of the type \"LORA\" are supported");
    }
    if !value("bias").is_null() && value("bias") != "none" {
        return refuse("bias", "only \"none\" is supported");
    }
    let initialisation = value("init_lora_weights");
    let keeps_base = initialisation.is_boolean()
        || initialisation.is_null()
        || initialisation.as_str().is_some_and(|name| INITIALISATIONS.contains(&name));
    if !keeps_base {
        return refuse("init_lora_weights", "it changes the base's weights, or needs data");
    }
    let known =
        |name: &String| READ.iter().chain(&WITHOUT_EFFECT).any(|known| *known == name.as_str());
    let set = settings.iter().find(|(name, value)| !known(name) && !is_empty(value));
    set.and_then(|(name, _)| refuse(name, reason(name)))
}

/// Returns whether a value is that of a setting that is not in use.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Object(map) => map.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

/// Returns why a setting is refused.
fn reason(setting: &str) -> &'static str {
    match setting {
        "use_dora" => "DoRA has a trained magnitude beside the two factors",
        "use_qalora"
        | "use_bdlora"
        | "velora_config"
        | "kasa_config"
        | "monteclora_config"
        | "arrow_config"
        | "alora_invocation_tokens" => "it is another type of adapter",
        "lora_bias" => "the factors have no bias here",
        "layer_replication" => "the model's layers are not replicated",
        "target_parameters" => "adapters are for the matrices of linear layers",
        "trainable_token_indices" => "a table is trained in full, in `modules_to_save`",
        "loftq_config" | "corda_config" | "lora_ga_config" | "eva_config" => {
            "it changes the base's weights, or initialises the factors from data"
        }
        "megatron_config" => "the layers are not Megatron's",
        "ensure_weight_tying" => "a tied matrix gets no adapter",
        _ => "the setting is unknown, and may change results",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused_in(more: Value) -> Option<String> {
        let mut settings = json!({ "peft_type": "LORA", "bias": "none", "use_dora": false });
        for (name, value) in more.as_object().unwrap() {
            settings[name] = value.clone();
        }
        refused(settings.as_object().unwrap()).map(|refused| refused.setting)
    }

    /// All settings that PEFT 0.21.2 writes by default.
    #[test]
    fn defaults_of_peft_are_read() {
        let defaults = json!({
            "task_type": "CAUSAL_LM", "peft_type": "LORA", "auto_mapping": null,
            "peft_version": "0.21.2", "base_model_name_or_path": "some/base", "revision": null,
            "inference_mode": true, "r": 8, "target_modules": ["q"], "exclude_modules": null,
            "lora_alpha": 8, "lora_dropout": 0.0, "fan_in_fan_out": false, "bias": "none",
            "use_rslora": false, "modules_to_save": null, "init_lora_weights": true,
            "layers_to_transform": null, "layers_pattern": null, "rank_pattern": {},
            "alpha_pattern": {}, "megatron_config": null, "megatron_core": "megatron.core",
            "trainable_token_indices": null, "loftq_config": {}, "eva_config": null,
            "corda_config": null, "lora_ga_config": null, "use_dora": false,
            "velora_config": null, "alora_invocation_tokens": null, "use_qalora": false,
            "qalora_group_size": 16, "monteclora_config": null, "layer_replication": null,
            "lora_bias": false, "target_parameters": null, "use_bdlora": null,
            "arrow_config": null, "kasa_config": null, "ensure_weight_tying": false,
        });
        assert_eq!(refused(defaults.as_object().unwrap()), None);
    }

    #[test]
    fn settings_without_an_equivalent_are_refused() {
        for (name, value) in [
            ("peft_type", json!("IA3")),
            ("bias", json!("lora_only")),
            ("use_dora", json!(true)),
            ("use_qalora", json!(true)),
            ("lora_bias", json!(true)),
            ("init_lora_weights", json!("pissa")),
            ("init_lora_weights", json!("mica")),
            ("layer_replication", json!([[0, 2]])),
            ("target_parameters", json!(["experts.down"])),
            ("trainable_token_indices", json!([3])),
            ("loftq_config", json!({ "loftq_bits": 4 })),
            ("eva_config", json!({ "rho": 2.0 })),
            ("corda_config", json!({ "cache_file": null })),
            ("arrow_config", json!({ "top_k": 3 })),
            ("megatron_config", json!({ "x": 1 })),
            ("a_setting_of_next_year", json!("on")),
        ] {
            assert_eq!(refused_in(json!({ name: value })).as_deref(), Some(name));
        }
        for (name, value) in [
            ("init_lora_weights", json!("gaussian")),
            ("init_lora_weights", json!(false)),
            ("a_setting_of_next_year", json!(null)),
            ("layers_pattern", json!("h")),
        ] {
            assert_eq!(refused_in(json!({ name: value })), None, "{name}");
        }
    }
}
