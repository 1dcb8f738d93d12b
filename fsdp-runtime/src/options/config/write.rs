//! Conversion of a [`Config`] to YAML, with the keys in the order of Accelerate's files.

use super::section::FsdpSection;
use super::types::Config;
use super::values::{FSDP, Named};

/// Text of `key: value` lines.
struct Lines {
    text: String,
    /// Spaces in front of each key.
    indent: &'static str,
}

impl Lines {
    fn put(&mut self, key: &str, value: impl ToString) {
        self.text.push_str(&format!("{}{key}: {}\n", self.indent, value.to_string()));
    }

    /// Writes a line if there is a value.
    fn put_some(&mut self, key: &str, value: Option<impl ToString>) {
        if let Some(value) = value {
            self.put(key, value);
        }
    }

    /// Writes a key and, indented below it, the lines that `write` adds.
    fn put_section(&mut self, key: &str, write: impl FnOnce(&mut Self)) {
        self.text.push_str(&format!("{key}:\n"));
        self.indent = "  ";
        write(self);
        self.indent = "";
    }
}

/// Returns the text of a file with this configuration.
pub(super) fn to_yaml(config: &Config) -> String {
    let fsdp = &config.fsdp;
    let mut lines = Lines { text: String::new(), indent: "" };
    lines.put("compute_environment", "LOCAL_MACHINE");
    lines.put("debug", config.debug);
    lines.put("distributed_type", FSDP);
    lines.put("downcast_bf16", quoted(if config.downcast_bf16 { "yes" } else { "no" }));
    lines.put_section("fsdp_config", |lines| put_fsdp(lines, fsdp));
    lines.put_some("gpu_ids", config.gpu_ids.as_deref().map(quoted));
    lines.put("machine_rank", config.machine_rank);
    lines.put_some("main_process_ip", config.main_process_ip.as_deref().map(quoted));
    lines.put_some("main_process_port", config.main_process_port);
    lines.put("mixed_precision", quoted(config.mixed_precision.name()));
    if let Some(mpirun) = &config.mpirun {
        let hostfile = mpirun.hostfile.as_ref().map(|path| quoted(&path.to_string_lossy()));
        let hostfile = hostfile.unwrap_or_else(|| "null".into());
        lines.put_section("mpirun_config", |lines| lines.put("mpirun_hostfile", hostfile));
    }
    lines.put("num_machines", config.num_machines);
    lines.put_some("num_processes", config.num_processes);
    let sizes = [
        ("parallelism_config_cp_size", fsdp.context),
        ("parallelism_config_dp_replicate_size", fsdp.replicate),
        ("parallelism_config_dp_shard_size", fsdp.shard),
        ("parallelism_config_tp_size", fsdp.tensor),
    ];
    let exchange = fsdp.context_exchange.map(Named::name_in_file);
    if sizes.iter().any(|(_, size)| size.is_some()) || exchange.is_some() {
        lines.put_section("parallelism_config", |lines| {
            lines.put_some("parallelism_config_cp_comm_strategy", exchange);
            sizes.into_iter().for_each(|(key, size)| lines.put_some(key, size));
        });
    }
    lines.put("use_cpu", config.use_cpu);
    lines.text
}

/// Writes the keys of `fsdp_config`.
fn put_fsdp(lines: &mut Lines, fsdp: &FsdpSection) {
    let text = |value: &dyn ToString| Some(value.to_string());
    let units = fsdp.transformer_layer_cls_to_wrap.join(",");
    let mut values: Vec<(&str, Option<String>)> = vec![
        ("fsdp_activation_checkpointing", text(&fsdp.activation_checkpointing)),
        (
            "fsdp_activation_checkpointing_offload",
            fsdp.activation_checkpointing_offload.then(|| "true".into()),
        ),
        ("fsdp_auto_wrap_policy", fsdp.auto_wrap_policy.map(|policy| policy.to_string())),
        ("fsdp_min_num_params", fsdp.min_num_params.map(|number| number.to_string())),
        ("fsdp_offload_params", text(&fsdp.offload_params)),
        ("fsdp_sharding_strategy", text(&fsdp.sharding_strategy)),
        ("fsdp_state_dict_type", fsdp.state_dict_type.map(|form| form.to_string())),
        ("fsdp_transformer_layer_cls_to_wrap", (!units.is_empty()).then(|| quoted(&units))),
        ("fsdp_use_orig_params", text(&true)),
    ];
    values.extend(fsdp.plain_fields().into_iter().map(|(key, field)| (key, field.text())));
    values.sort_by_key(|(key, _)| *key);
    values.into_iter().for_each(|(key, value)| lines.put_some(key, value));
}

/// Returns a scalar that YAML reads as the string `text`. It is quoted unless it is a word that
/// YAML cannot take for another type.
fn quoted(text: &str) -> String {
    let word = text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ','));
    let reserved = ["no", "yes", "on", "off", "true", "false", "null", "y", "n"]
        .iter()
        .any(|reserved| text.eq_ignore_ascii_case(reserved));
    if word && !reserved {
        text.to_string()
    } else if text.chars().any(char::is_control) {
        let escaped = text.chars().map(|c| match c {
            '"' | '\\' => format!("\\{c}"),
            c if c.is_control() => format!("\\u{:04X}", u32::from(c)),
            c => c.to_string(),
        });
        format!("\"{}\"", escaped.collect::<String>())
    } else {
        format!("'{}'", text.replace('\'', "''"))
    }
}
