//! [`Overrides`]: values of the command line, which override those of a file.

use serde_json::Value as Json;

use super::error::{ConfigError, Note, Problem, ProblemKind};
use super::keys::{self, PARALLELISM, PARALLELISM_PREFIX, Section};
use super::nearest::nearest;
use super::place::Place;
use super::yaml::{self, KeyValue, Node, Value};

/// Environment variable with the values of `fsdp launch`'s command line that override the
/// configuration file, as JSON in the shape of a file. `fsdp launch` sets it for each rank.
pub const OVERRIDES_VARIABLE: &str = "FSDP_CONFIG_FLAGS";

/// Key of the map with `mpirun_hostfile`.
const MPIRUN: &str = "mpirun_config";

/// Values of the command line that override those of a configuration file.
///
/// The keys are those of a file, without the map that they stand in. Values are checked when the
/// configuration is read.
///
/// ```
/// use fsdp_runtime::options::ShardingStrategy;
/// use fsdp_runtime::config::{Config, Overrides};
///
/// let mut overrides = Overrides::default();
/// overrides.set("fsdp_sharding_strategy", "SHARD_GRAD_OP")?;
/// let (config, _) = Config::read_with(None, &overrides)?;
/// assert_eq!(config.fsdp.sharding_strategy, ShardingStrategy::ShardGradOp);
/// # Ok::<(), fsdp_runtime::config::ConfigError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// A tree in the shape of a file.
    entries: Vec<KeyValue>,
}

impl Overrides {
    /// Sets the value of a key. An earlier value of the key is replaced.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Invalid`] if no configuration file has such a key.
    pub fn set(&mut self, key: &str, value: impl Into<String>) -> Result<(), ConfigError> {
        self.set_value(key, Value::Scalar { text: value.into(), plain: false })
    }

    pub(super) fn set_value(&mut self, key: &str, value: Value) -> Result<(), ConfigError> {
        let entries = match map_of(key) {
            Some(Map::Top) => &mut self.entries,
            Some(Map::Inner(map)) => self.inner(map),
            None => {
                let keys = [Section::Fsdp, Section::Top].into_iter().flat_map(Section::keys);
                let nearest = nearest(key, keys.map(|key| key.name));
                let kind = ProblemKind::UnknownKey { key: key.into(), nearest };
                return Err(invalid(kind));
            }
        };
        entries.retain(|entry| entry.key != key);
        entries.push(entry(key, value));
        Ok(())
    }

    /// Returns the value of a key; `None` if it is not set.
    pub(super) fn get(&self, key: &str) -> Option<&Node> {
        let find = |entries: &'_ [KeyValue]| entries.iter().position(|entry| entry.key == key);
        let entries = match map_of(key)? {
            Map::Top => &self.entries,
            Map::Inner(map) => {
                let map = self.entries.iter().find(|entry| entry.key == map)?;
                let Value::Map(entries) = &map.value.value else { return None };
                entries
            }
        };
        Some(&entries[find(entries)?].value)
    }

    /// Returns whether no value is set.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the text of [`OVERRIDES_VARIABLE`].
    pub fn to_variable(&self) -> String {
        json_map(&self.entries).to_string()
    }

    /// Reads the text of [`OVERRIDES_VARIABLE`].
    ///
    /// # Errors
    ///
    /// [`ConfigError::Syntax`] if the text is not JSON.
    pub fn from_variable(text: &str) -> Result<Self, ConfigError> {
        let syntax = |error: serde_json::Error| ConfigError::Syntax {
            path: OVERRIDES_VARIABLE.into(),
            line: error.line(),
            column: error.column(),
            message: error.to_string(),
        };
        serde_json::from_str::<serde_json::Map<String, Json>>(text).map_err(syntax)?;
        // JSON is YAML.
        let mut entries = match yaml::parse(text) {
            Ok(Some(Node { value: Value::Map(entries), .. })) => entries,
            _ => Vec::new(),
        };
        place_on_command_line(&mut entries);
        Ok(Self { entries })
    }

    /// Returns the entries of a file with these values in place of the file's. Adds a note for each
    /// key of the file that is overridden.
    pub(super) fn apply(&self, mut file: Vec<KeyValue>, notes: &mut Vec<Note>) -> Vec<KeyValue> {
        for own in &self.entries {
            let Value::Map(inner) = &own.value.value else {
                replace(&mut file, own, Section::Top, notes);
                continue;
            };
            let of_file = file.iter_mut().find(|entry| entry.key == own.key);
            match of_file.map(|entry| &mut entry.value.value) {
                Some(Value::Map(of_file)) => {
                    for own in inner {
                        replace(of_file, own, Section::Fsdp, notes);
                    }
                }
                // A text in place of a map is a problem of its own, with its line.
                Some(Value::Scalar { text, .. }) if !text.is_empty() => {}
                _ => {
                    file.retain(|entry| entry.key != own.key);
                    file.push(own.clone());
                }
            }
        }
        file
    }

    /// Returns the entries of a map, which is made if it does not exist.
    fn inner(&mut self, map: &str) -> &mut Vec<KeyValue> {
        let found = self.entries.iter().position(|entry| entry.key == map);
        let index = found.unwrap_or_else(|| {
            self.entries.push(entry(map, Value::Map(Vec::new())));
            self.entries.len() - 1
        });
        let value = &mut self.entries[index].value.value;
        if !matches!(value, Value::Map(_)) {
            *value = Value::Map(Vec::new());
        }
        match value {
            Value::Map(entries) => entries,
            _ => unreachable!("made a map above"),
        }
    }
}

/// Returns the error of a problem of the command line.
pub(super) fn invalid(kind: ProblemKind) -> ConfigError {
    let problems = vec![Problem { place: Some(Place::CommandLine), kind }];
    ConfigError::Invalid { path: Default::default(), problems }
}

/// The map of a file that a key stands in.
enum Map {
    Top,
    /// The map under this key of the top level.
    Inner(&'static str),
}

/// Returns the map that a key stands in; `None` for an unknown key.
fn map_of(key: &str) -> Option<Map> {
    if key.starts_with(PARALLELISM_PREFIX) {
        Some(Map::Inner(PARALLELISM))
    } else if key == "mpirun_hostfile" || key == "mpirun_ccl" {
        Some(Map::Inner(MPIRUN))
    } else if Section::Fsdp.find(key).is_some() {
        Some(Map::Inner("fsdp_config"))
    } else {
        Section::Top.find(key).map(|_| Map::Top)
    }
}

fn entry(key: &str, value: Value) -> KeyValue {
    let place = Place::CommandLine;
    KeyValue { key: key.into(), place, value: Node { place, value } }
}

fn place_on_command_line(entries: &mut [KeyValue]) {
    for entry in entries {
        entry.place = Place::CommandLine;
        entry.value.place = Place::CommandLine;
        if let Value::Map(inner) = &mut entry.value.value {
            place_on_command_line(inner);
        }
    }
}

/// Replaces a key of a file, and the keys of the same meaning.
fn replace(file: &mut Vec<KeyValue>, own: &KeyValue, section: Section, notes: &mut Vec<Note>) {
    let meaning = keys::meaning(&own.key);
    file.retain(|entry| {
        let key = section.find_older(&entry.key).map_or(entry.key.as_str(), |key| key.name);
        let overridden = keys::meaning(key) == meaning;
        // A key without a value counts as left out.
        if overridden && entry.place != Place::CommandLine && !entry.value.is_null() {
            let (value, of_flag) = (entry.value.shown(), own.value.shown());
            notes.push(Note {
                place: entry.place,
                key: entry.key.clone(),
                reason: format!("the command line has `{}: {of_flag}`", own.key),
                off: key == own.key && value.eq_ignore_ascii_case(&of_flag),
                value,
            });
        }
        !overridden || entry.place == Place::CommandLine
    });
    file.push(own.clone());
}

/// Returns entries as a JSON object.
fn json_map(entries: &[KeyValue]) -> Json {
    Json::Object(entries.iter().map(|entry| (entry.key.clone(), json(&entry.value))).collect())
}

fn json(node: &Node) -> Json {
    match &node.value {
        _ if node.is_null() => Json::Null,
        Value::Scalar { text, .. } => Json::String(text.clone()),
        Value::List(items) => Json::Array(items.iter().map(json).collect()),
        Value::Map(entries) => json_map(entries),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;
    use crate::options::ShardingStrategy;

    fn overrides(values: &[(&str, &str)]) -> Overrides {
        let mut overrides = Overrides::default();
        for (key, value) in values {
            overrides.set(key, *value).unwrap();
        }
        overrides
    }

    fn read(text: &str, values: &[(&str, &str)]) -> Result<(Config, Vec<Note>), ConfigError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.yaml");
        std::fs::write(&path, text).unwrap();
        Config::read_with(Some(&path), &overrides(values))
    }

    #[test]
    fn a_value_of_the_command_line_replaces_the_one_of_the_file_with_a_note() {
        let file = "num_processes: 2\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n";
        let values = [("fsdp_sharding_strategy", "SHARD_GRAD_OP"), ("num_processes", "4")];
        let (config, notes) = read(file, &values).unwrap();
        assert_eq!(config.fsdp.sharding_strategy, ShardingStrategy::ShardGradOp);
        assert_eq!(config.num_processes, Some(4));
        let notes: Vec<String> = notes.iter().map(Note::to_string).collect();
        assert_eq!(
            notes,
            [
                "line 1: `num_processes: 2` has no effect here: the command line has \
                 `num_processes: 4`",
                "line 3: `fsdp_sharding_strategy: FULL_SHARD` has no effect here: the command line \
                 has `fsdp_sharding_strategy: SHARD_GRAD_OP`",
            ]
        );
    }

    #[test]
    fn a_value_replaces_the_keys_of_the_same_meaning() {
        let file = "fp16: true\nfsdp_config:\n  fsdp_reshard_after_forward: true\n  \
                    fsdp_backward_prefetch_policy: BACKWARD_PRE\n";
        let values = [
            ("fsdp_sharding_strategy", "NO_SHARD"),
            ("fsdp_backward_prefetch", "NO_PREFETCH"),
            ("mixed_precision", "no"),
        ];
        let (config, notes) = read(file, &values).unwrap();
        assert_eq!(config.fsdp.sharding_strategy, ShardingStrategy::NoShard);
        assert_eq!(config.mixed_precision, super::super::MixedPrecision::No);
        assert_eq!(notes.len(), 3, "{notes:#?}");
        assert!(notes.iter().all(|note| !note.off));
        // The file's key without its prefix is the same key.
        let (config, _) = read("fsdp_config:\n  sharding_strategy: 1\n", &values).unwrap();
        assert_eq!(config.fsdp.sharding_strategy, ShardingStrategy::NoShard);
    }

    #[test]
    fn an_error_says_whether_the_file_or_the_command_line_is_to_blame() {
        let error = |file: &str, values: &[(&str, &str)]| {
            let text = read(file, values).unwrap_err().to_string();
            text.rsplit_once("config.yaml: ").map_or(text.clone(), |(_, rest)| rest.to_string())
        };
        let wrong = [("fsdp_sharding_strategy", "FULL_SHRAD")];
        assert_eq!(
            error("num_processes: 2\n", &wrong),
            "command line: unknown value `FULL_SHRAD` for `fsdp_sharding_strategy`; did you mean \
             `FULL_SHARD`?"
        );
        let loading = "fsdp_config:\n  fsdp_sync_module_states: false\n";
        assert_eq!(
            error(loading, &[("fsdp_cpu_ram_efficient_loading", "true")]),
            "command line: `fsdp_cpu_ram_efficient_loading` is `true`, but \
             `fsdp_sync_module_states` on line 2 is `false`; weights that only rank 0 has read must \
             be broadcast"
        );
        let text = error("num_processes: many\n", &wrong);
        assert!(text.starts_with("2 problems\n  line 1: "), "{text}");
        assert!(text.contains("\n  command line: "), "{text}");
        // What the command line replaces is not read.
        assert!(read("mixed_precision: int8\n", &[("mixed_precision", "bf16")]).is_ok());
        let mut none = Overrides::default();
        let unknown = none.set("fsdp_shardng_strategy", "1").unwrap_err().to_string();
        assert!(unknown.contains("did you mean `fsdp_sharding_strategy`?"), "{unknown}");
    }

    #[test]
    fn values_reach_the_ranks_through_the_environment() {
        let sent = overrides(&[
            ("fsdp_transformer_layer_cls_to_wrap", "A,B"),
            ("main_process_ip", "no: \"quotes\""),
            ("parallelism_config_dp_replicate_size", "2"),
            ("mpirun_hostfile", "/tmp/hosts"),
            ("fsdp_offload_params", "true"),
        ]);
        let text = sent.to_variable();
        assert_eq!(Overrides::from_variable(&text).unwrap().to_variable(), text);
        let read = Config::from_variables(|name| {
            (name == OVERRIDES_VARIABLE).then(|| text.clone().into())
        });
        let (config, _) = read.unwrap().unwrap();
        assert!(config.fsdp.offload_params);
        assert_eq!(config.fsdp.transformer_layer_cls_to_wrap, ["A", "B"]);
        assert_eq!(config.main_process_ip.as_deref(), Some("no: \"quotes\""));
        assert_eq!(config.fsdp.replicate, Some(2));
        for broken in ["{", "[]", "{}x"] {
            let error = Overrides::from_variable(broken).unwrap_err().to_string();
            assert!(error.starts_with("FSDP_CONFIG_FLAGS: line 1"), "{error}");
        }
    }
}
