//! The options of Hugging Face's `Trainer`: `--fsdp "full_shard auto_wrap"`, and the JSON file of
//! `--fsdp_config`.

use std::path::Path;

use super::error::{ConfigError, ProblemKind};
use super::nearest::nearest;
use super::overrides::{Overrides, invalid};
use super::read::check_fsdp_section;
use super::values::Named;
use super::yaml::{self, Node, Value};
use crate::options::ShardingStrategy;

/// Options of `--fsdp`, the longest first: `hybrid_shard_zero2` begins with `hybrid_shard`.
const OPTIONS: [&str; 7] = [
    "hybrid_shard_zero2",
    "hybrid_shard",
    "full_shard",
    "shard_grad_op",
    "no_shard",
    "offload",
    "auto_wrap",
];

impl Overrides {
    /// Sets the values of a JSON file of `Trainer`'s `fsdp_config`. Its keys are those under
    /// `fsdp_config`, with or without the prefix `fsdp_`.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Read`] and [`ConfigError::Syntax`] for a file that cannot be read, and
    /// [`ConfigError::Invalid`] with every unknown key and value, by its line.
    pub fn read_trainer_config(&mut self, path: impl AsRef<Path>) -> Result<(), ConfigError> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.into(), source })?;
        self.parse_trainer_config(&text, path)
    }

    /// Sets the values of the text of such a file. Errors name the file as `path`.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Syntax`] and [`ConfigError::Invalid`], as
    /// [`read_trainer_config`](Self::read_trainer_config).
    pub fn parse_trainer_config(
        &mut self,
        text: &str,
        path: impl AsRef<Path>,
    ) -> Result<(), ConfigError> {
        let path = path.as_ref();
        let syntax = |line, column, message| ConfigError::Syntax {
            path: path.into(),
            line,
            column,
            message,
        };
        // JSON is YAML, whose tree has line numbers.
        let root =
            yaml::parse(text).map_err(|error| syntax(error.line, error.column, error.message))?;
        let Some(Node { value: Value::Map(mut entries), .. }) = root else {
            return Err(syntax(1, 1, "expected an object, `{\"key\": value, ..}`".into()));
        };
        for entry in &mut entries {
            entry.key = key_in_file(&entry.key);
        }
        // 0 is the default of `Trainer`, and stands for no minimum.
        entries
            .retain(|entry| entry.key != "fsdp_min_num_params" || entry.value.text() != Some("0"));
        let problems = check_fsdp_section(&entries);
        if !problems.is_empty() {
            return Err(ConfigError::Invalid { path: path.into(), problems });
        }
        entries.into_iter().try_for_each(|entry| self.set_value(&entry.key, entry.value.value))
    }

    /// Sets the values that `Trainer`'s option `--fsdp` stands for, such as `full_shard auto_wrap`.
    /// Values that are set already must agree.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Invalid`] for an unknown option, for two strategies, and for an option that
    /// contradicts a value.
    pub fn set_trainer_options(&mut self, text: &str) -> Result<(), ConfigError> {
        let options = options(text)?;
        let mut strategies = options.iter().filter_map(|option| ShardingStrategy::named(option));
        if let Some(strategy) = strategies.next() {
            if strategies.next().is_some() {
                return Err(wrong(text, "one strategy, such as `full_shard auto_wrap`"));
            }
            let same = |value: &str| ShardingStrategy::named_or_numbered(value) == Some(strategy);
            self.set_agreeing(text, "fsdp_sharding_strategy", strategy.name_in_file(), same)?;
        }
        if options.contains(&"offload") {
            let same = |value: &str| value.eq_ignore_ascii_case("true");
            self.set_agreeing(text, "fsdp_offload_params", "true", same)?;
        }
        if options.contains(&"auto_wrap") && self.get("fsdp_auto_wrap_policy").is_none() {
            let by_size = self.get("fsdp_min_num_params").is_some()
                && self.get("fsdp_transformer_layer_cls_to_wrap").is_none();
            let policy = if by_size { "SIZE_BASED_WRAP" } else { "TRANSFORMER_BASED_WRAP" };
            self.set("fsdp_auto_wrap_policy", policy)?;
        }
        Ok(())
    }

    /// Sets a value. Returns an error if the key has a value that is not the `same`.
    fn set_agreeing(
        &mut self,
        option: &str,
        key: &'static str,
        value: &str,
        same: impl Fn(&str) -> bool,
    ) -> Result<(), ConfigError> {
        let Some(set) = self.get(key) else { return self.set(key, value) };
        if set.text().is_some_and(same) {
            return Ok(());
        }
        Err(invalid(ProblemKind::Contradiction {
            key: "fsdp",
            value: option.into(),
            other: key,
            other_place: set.place,
            other_value: set.shown(),
            fix: "remove one of them",
        }))
    }
}

/// Returns the key of a configuration file for a key of `Trainer`'s JSON.
fn key_in_file(key: &str) -> String {
    let short = key.strip_prefix("fsdp_").unwrap_or(key);
    match short {
        "cpu_offload" => "fsdp_offload_params".into(),
        _ if short.starts_with("xla") => short.into(),
        _ => format!("fsdp_{short}"),
    }
}

/// Splits the text of `--fsdp` into options. Words may be separated by spaces, commas, hyphens or
/// underscores: the guides write `full shard`.
fn options(text: &str) -> Result<Vec<&'static str>, ConfigError> {
    let separator = |c: char| c.is_whitespace() || matches!(c, ',' | '_' | '-');
    let lower = text.to_ascii_lowercase();
    let words: Vec<&str> = lower.split(separator).filter(|word| !word.is_empty()).collect();
    match words.as_slice() {
        ["true"] => return Ok(Vec::new()),
        [] | ["false"] => {
            let instead = "models are always sharded with this crate; `no_shard` replicates them";
            let value = text.to_string();
            return Err(invalid(ProblemKind::Unsupported { key: "fsdp", value, instead }));
        }
        _ => {}
    }
    let mut rest = words.as_slice();
    let mut found = Vec::new();
    while !rest.is_empty() {
        let option = OPTIONS.into_iter().find_map(|option| {
            let parts: Vec<&str> = option.split('_').collect();
            rest.starts_with(&parts).then_some((option, parts.len()))
        });
        let Some((option, length)) = option else {
            let valid = OPTIONS.to_vec();
            let nearest = nearest(&rest.join("_"), valid.iter().copied());
            let (key, value) = ("fsdp".into(), text.into());
            return Err(invalid(ProblemKind::UnknownValue { key, value, nearest, valid }));
        };
        found.push(option);
        rest = &rest[length..];
    }
    Ok(found)
}

/// Returns the error for a value of `--fsdp` that is not `expected`.
fn wrong(value: &str, expected: &str) -> ConfigError {
    let (key, value, expected) = ("fsdp".into(), value.into(), expected.into());
    invalid(ProblemKind::WrongValue { key, value, expected })
}

#[cfg(test)]
mod tests {
    use super::super::{AutoWrapPolicy, Config, FsdpSection, Note};
    use super::*;

    /// Returns what `Trainer`'s two options make of a configuration without a file.
    fn trainer(options: &str, json: Option<&str>) -> Result<(FsdpSection, Vec<Note>), String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fsdp.json");
        let mut overrides = Overrides::default();
        let made = json.map_or(Ok(()), |json| {
            std::fs::write(&path, json).unwrap();
            overrides.read_trainer_config(&path)
        });
        let made = made.and_then(|()| overrides.set_trainer_options(options));
        let text = |error: ConfigError| {
            error.to_string().replace(&directory.path().display().to_string(), "")
        };
        made.map_err(text)?;
        let sent = Overrides::from_variable(&overrides.to_variable()).unwrap();
        assert_eq!(sent.to_variable(), overrides.to_variable());
        let (config, notes) = Config::read_with(None, &overrides).map_err(text)?;
        Ok((config.fsdp, notes))
    }

    #[test]
    fn the_options_of_trainer_are_strategies_and_offload_and_wrapping() {
        use ShardingStrategy::*;
        let cases = [
            ("full_shard auto_wrap", FullShard, false, true),
            ("full shard", FullShard, false, false),
            ("shard_grad_op", ShardGradOp, false, false),
            ("hybrid_shard offload", HybridShard, true, false),
            ("hybrid_shard_zero2 auto_wrap offload", HybridShardZero2, true, true),
            ("no_shard", NoShard, false, false),
            ("FULL_SHARD", FullShard, false, false),
            ("true", FullShard, false, false),
        ];
        for (options, strategy, offload, wraps) in cases {
            let (fsdp, notes) = trainer(options, None).unwrap();
            assert_eq!(fsdp.sharding_strategy, strategy, "{options}");
            assert_eq!(fsdp.offload_params, offload, "{options}");
            let policy = wraps.then_some(AutoWrapPolicy::TransformerBased);
            assert_eq!(fsdp.auto_wrap_policy, policy, "{options}");
            assert!(notes.is_empty(), "{notes:?}");
        }
    }

    #[test]
    fn wrong_options_of_trainer_are_refused() {
        let error = |options: &str| trainer(options, None).unwrap_err();
        assert_eq!(
            error("full_shrad"),
            "command line: unknown value `full_shrad` for `fsdp`; did you mean `full_shard`?"
        );
        assert!(error("zero3").contains("expected `hybrid_shard_zero2`, "), "{}", error("zero3"));
        assert!(error("full_shard no_shard").contains("expected one strategy"));
        assert!(error("false").contains("`no_shard` replicates them"));
        let error = trainer("shard_grad_op", Some(r#"{"sharding_strategy": "FULL_SHARD"}"#));
        let part = "`fsdp` is `shard_grad_op`, but `fsdp_sharding_strategy` on the command line is";
        assert!(error.as_ref().unwrap_err().contains(part), "{error:?}");
    }

    #[test]
    fn a_json_file_of_trainer_has_keys_with_and_without_the_prefix() {
        let json = "{\n\t\"transformer_layer_cls_to_wrap\": [\"BertLayer\", \"T5Block\"],\n  \
            \"backward_prefetch\": \"backward_post\",\n  \"fsdp_forward_prefetch\": \"false\",\n  \
            \"limit_all_gathers\": true,\n  \"use_orig_params\": true,\n  \
            \"sync_module_states\": true,\n  \"cpu_ram_efficient_loading\": true,\n  \
            \"activation_checkpointing\": true,\n  \"state_dict_type\": \"FULL_STATE_DICT\",\n  \
            \"min_num_params\": 0,\n  \"cpu_offload\": true,\n  \"version\": 1,\n  \
            \"reshard_after_forward\": \"full_shard\",\n  \"xla\": true,\n  \
            \"xla_fsdp_settings\": {\"compute_dtype\": \"bfloat16\"}\n}\n";
        let (fsdp, notes) = trainer("full_shard auto_wrap", Some(json)).unwrap();
        assert_eq!(fsdp.transformer_layer_cls_to_wrap, ["BertLayer", "T5Block"]);
        assert_eq!(fsdp.backward_prefetch, Some(crate::options::BackwardPrefetch::Post));
        assert_eq!(fsdp.forward_prefetch, Some(false));
        assert_eq!(fsdp.state_dict_type, Some(super::super::StateDictType::Full));
        assert!(fsdp.activation_checkpointing && fsdp.offload_params);
        assert_eq!(fsdp.cpu_ram_efficient_loading, Some(true));
        let loud: Vec<String> =
            notes.iter().filter(|note| !note.off).map(Note::to_string).collect();
        assert_eq!(loud.len(), 2, "{loud:#?}");
        assert!(loud[0].starts_with("command line: `xla: true`"), "{loud:#?}");

        let sized = trainer("shard_grad_op auto_wrap", Some(r#"{"min_num_params": 2000}"#));
        let (fsdp, _) = sized.unwrap();
        assert_eq!(fsdp.auto_wrap_policy, Some(AutoWrapPolicy::SizeBased));
        assert_eq!(fsdp.min_num_params, Some(2000));
    }

    #[test]
    fn mistakes_in_a_json_file_are_reported_with_their_lines() {
        let json = "{\n  \"backward_prefech\": \"backward_pre\",\n  \"min_num_param\": 100,\n  \
                    \"forward_prefetch\": \"maybe\"\n}\n";
        assert_eq!(
            trainer("full_shard", Some(json)).unwrap_err(),
            "/fsdp.json: 3 problems\n  \
             line 2: unknown key `fsdp_backward_prefech`; did you mean `fsdp_backward_prefetch`?\n  \
             line 3: unknown key `fsdp_min_num_param`; did you mean `fsdp_min_num_params`?\n  \
             line 4: `fsdp_forward_prefetch` is `maybe`; expected true or false"
        );
        for broken in ["[1, 2]", "{\"xla\": ", "7"] {
            let error = trainer("full_shard", Some(broken)).unwrap_err();
            assert!(error.starts_with("/fsdp.json: line "), "{error}");
        }
    }
}
