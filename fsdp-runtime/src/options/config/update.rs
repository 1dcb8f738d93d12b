//! [`update`]: an older file in today's keys. Lines that need no change stay as they are, with
//! their comments.

use std::fmt;
use std::path::Path;

use super::error::ConfigError;
use super::keys::{self, Section};
use super::overrides::Overrides;
use super::place::Place;
use super::read;
use super::types::Config;
use super::values::boolean;
use super::yaml::{self, KeyValue, Node, Value};

/// A key of an older file, and what stands in its place.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Update {
    /// Line in the older file, counted from 1.
    pub line: usize,
    /// Key in the older file.
    pub key: String,
    /// Text in place of the key, or of its line; `None` if the line is removed.
    pub now: Option<String>,
}

impl fmt::Display for Update {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { line, key, now } = self;
        match now {
            Some(now) => write!(f, "line {line}: `{key}` is now `{now}`"),
            None => write!(f, "line {line}: `{key}` is removed: a newer key replaces it"),
        }
    }
}

/// Spellings of the guides for keys under `fsdp_config`.
const GUIDES: [(&str, &str); 3] = [
    ("fsdp_wrap_policy", "fsdp_auto_wrap_policy"),
    ("fsdp_min_num_param", "fsdp_min_num_params"),
    ("fsdp_cpu_offload", "fsdp_offload_params"),
];

/// A change of one line.
enum Edit {
    /// Another name of the key.
    Rename(String),
    /// Another key and value.
    Replace(String),
    Remove,
}

/// Rewrites the text of an older file in today's keys. Everything else of the text stays as it is:
/// comments, the order, keys without effect. Errors name the file as `path`.
///
/// # Errors
///
/// Those of [`Config::parse`] for the new text.
///
/// # Examples
///
/// ```
/// use fsdp_runtime::config::update;
///
/// let older = "fp16: true # fast\nfsdp_config:\n  min_num_params: 2000\n";
/// let (text, updates) = update(older, "fsdp.yaml")?;
/// assert_eq!(text, "mixed_precision: fp16 # fast\nfsdp_config:\n  fsdp_min_num_params: 2000\n");
/// assert_eq!(updates.len(), 2);
/// # Ok::<(), fsdp_runtime::config::ConfigError>(())
/// ```
pub fn update(text: &str, path: impl AsRef<Path>) -> Result<(String, Vec<Update>), ConfigError> {
    let path = path.as_ref();
    // A text that is no YAML has its error below.
    let root = yaml::parse(text).ok().flatten();
    let mut lines: Vec<Option<String>> = text.split('\n').map(|line| Some(line.into())).collect();
    let mut updates = Vec::new();
    for (entry, edit) in root.iter().flat_map(edits) {
        let Place::Line(number) = entry.place else { continue };
        let Some(Some(line)) = lines.get(number - 1) else { continue };
        let Some(edited) = edited(line, entry, &edit) else { continue };
        let now = match edit {
            Edit::Rename(now) | Edit::Replace(now) => Some(now),
            Edit::Remove => None,
        };
        updates.push(Update { line: number, key: entry.key.clone(), now });
        lines[number - 1] = edited;
    }
    let text = lines.into_iter().flatten().collect::<Vec<String>>().join("\n");
    read::read(&text, path, &Overrides::default())?;
    Ok((text, updates))
}

impl Config {
    /// Returns whether this configuration is the one of `text`, which is a file.
    #[cfg(test)]
    fn is_of(&self, text: &str) -> bool {
        Self::parse(text, "other").is_ok_and(|(other, _)| other == *self)
    }
}

/// Returns the entries of a file that are written otherwise today.
fn edits(root: &Node) -> Vec<(&KeyValue, Edit)> {
    let Value::Map(top) = &root.value else { return Vec::new() };
    let has = |entries: &[KeyValue], key: &str| entries.iter().any(|entry| entry.key == key);
    let mut edits = Vec::new();
    for entry in top {
        match entry.key.as_str() {
            "fp16" if has(top, "mixed_precision") => edits.push((entry, Edit::Remove)),
            "fp16" => {
                let on = entry.value.text().and_then(boolean) == Some(true);
                let value = if on { "fp16" } else { "'no'" };
                edits.push((entry, Edit::Replace(format!("mixed_precision: {value}"))));
            }
            "dynamo_backend" if has(top, "dynamo_config") => edits.push((entry, Edit::Remove)),
            "dynamo_backend" => {
                let backend = entry.value.shown();
                let off = backend.eq_ignore_ascii_case("no");
                let inner = if off { String::new() } else { format!("dynamo_backend: {backend}") };
                edits.push((entry, Edit::Replace(format!("dynamo_config: {{{inner}}}"))));
            }
            "fsdp_config" => {
                let Value::Map(fsdp) = &entry.value.value else { continue };
                let edit = |entry| Some((entry, fsdp_edit(entry, &|key| has(fsdp, key))?));
                edits.extend(fsdp.iter().filter_map(edit));
            }
            _ => {}
        }
    }
    edits
}

/// Returns the change of a key under `fsdp_config`, if it has another name today.
fn fsdp_edit(entry: &KeyValue, has: &impl Fn(&str) -> bool) -> Option<Edit> {
    let key = entry.key.as_str();
    let prefixed = format!("fsdp_{key}");
    let guide = GUIDES.iter().find(|(guide, _)| *guide == key || *guide == prefixed);
    let now = match (Section::Fsdp.find_older(key), guide) {
        (Some(known), _) => keys::newer_name(known.name).unwrap_or(known.name),
        (None, Some((_, now))) => now,
        (None, None) => return None,
    };
    if now == key {
        return None;
    }
    Some(if has(now) { Edit::Remove } else { Edit::Rename(now.into()) })
}

/// Returns the line of an entry after an edit; the inner `None` for a line that is removed. `None`
/// if the line has more than the entry, as in `{a: 1, b: 2}`, and cannot be edited so.
#[allow(clippy::option_option, reason = "a line that is removed is no line that stays")]
fn edited(line: &str, entry: &KeyValue, edit: &Edit) -> Option<Option<String>> {
    let key = entry.key.as_str();
    let alone = line.trim_start().trim_start_matches(['"', '\'']).starts_with(key)
        && matches!(entry.value.value, Value::Scalar { .. });
    match edit {
        Edit::Rename(now) => {
            let start = line.match_indices(key).map(|(start, _)| start).find(|start| {
                let (before, after) = (&line[..*start], &line[start + key.len()..]);
                let part = |c: char| c.is_alphanumeric() || c == '_';
                !before.ends_with(part)
                    && after.trim_start_matches(['"', '\'']).trim_start().starts_with(':')
            })?;
            Some(Some(format!("{}{now}{}", &line[..start], &line[start + key.len()..])))
        }
        Edit::Replace(now) if alone => {
            let indent = &line[..line.len() - line.trim_start().len()];
            let comment = line.find(" #").map_or("", |start| &line[start..]);
            let end = if line.ends_with('\r') && comment.is_empty() { "\r" } else { "" };
            Some(Some(format!("{indent}{now}{comment}{end}")))
        }
        Edit::Remove if alone => Some(None),
        Edit::Replace(_) | Edit::Remove => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_file_gets_todays_keys_and_keeps_the_rest() {
        let older = "\
# our cluster
compute_environment: LOCAL_MACHINE
dynamo_backend: 'NO'
fp16: true # for the old GPUs
tpu_name: null
fsdp_config:
  # as before
  fsdp_backward_prefetch_policy: BACKWARD_POST
  min_num_params: 2000
  'sharding_strategy': 2
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
num_processes: 2
";
        let (text, updates) = update(older, "config.yaml").unwrap();
        let expected = "\
# our cluster
compute_environment: LOCAL_MACHINE
dynamo_config: {}
mixed_precision: fp16 # for the old GPUs
tpu_name: null
fsdp_config:
  # as before
  fsdp_backward_prefetch: BACKWARD_POST
  fsdp_min_num_params: 2000
  'fsdp_sharding_strategy': 2
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
num_processes: 2
";
        assert_eq!(text, expected);
        let updates: Vec<String> = updates.iter().map(Update::to_string).collect();
        assert_eq!(updates.len(), 5, "{updates:#?}");
        assert_eq!(updates[1], "line 4: `fp16` is now `mixed_precision: fp16`");
        assert_eq!(
            updates[2],
            "line 8: `fsdp_backward_prefetch_policy` is now `fsdp_backward_prefetch`"
        );
        let (config, _) = Config::parse(older, "older").unwrap();
        assert!(config.is_of(&text), "{text}");
        assert_eq!(update(&text, "config.yaml").unwrap(), (text, Vec::new()), "nothing is left");
    }

    #[test]
    fn an_older_key_beside_its_newer_one_is_removed() {
        let older = "mixed_precision: bf16\r\nfp16: true\r\nfsdp_config:\r\n  \
                     fsdp_backward_prefetch: BACKWARD_PRE\r\n  \
                     fsdp_backward_prefetch_policy: BACKWARD_POST\r\n";
        let (text, updates) = update(older, "config.yaml").unwrap();
        let expected = "mixed_precision: bf16\r\nfsdp_config:\r\n  \
                        fsdp_backward_prefetch: BACKWARD_PRE\r\n";
        assert_eq!(text, expected);
        assert!(updates[0].to_string().contains("`fp16` is removed"), "{updates:?}");
    }

    /// A file with the spelling of the guides cannot be read before it is updated.
    #[test]
    fn the_spelling_of_the_guides_is_mended() {
        let guides = "fsdp_config: {fsdp_wrap_policy: SIZE_BASED_WRAP, min_num_param: 100}\n";
        assert!(Config::parse(guides, "config.yaml").is_err());
        let (text, updates) = update(guides, "config.yaml").unwrap();
        let expected =
            "fsdp_config: {fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_min_num_params: 100}\n";
        assert_eq!((text.as_str(), updates.len()), (expected, 2));
    }

    #[test]
    fn other_mistakes_are_reported() {
        let error = update("fp16: true\nnum_procesess: 2\n", "config.yaml").unwrap_err();
        assert!(error.to_string().contains("did you mean `num_processes`?"), "{error}");
        assert!(update("a: [1\n", "config.yaml").is_err());
        assert_eq!(update("", "config.yaml").unwrap(), (String::new(), Vec::new()));
    }

    proptest::proptest! {
        /// No text makes the update panic, and an update changes nothing that is read.
        #[test]
        fn an_update_has_the_configuration_of_the_older_file(
            key in "(fsdp_)?(sharding_strategy|offload_params|min_num_params|wrap_policy)",
            flow in proptest::bool::ANY,
            text in "[ a-z_:0-9\\[\\]{}'\"#,\n-]{0,60}",
        ) {
            let _ = update(&text, "any");
            let file = match flow {
                true => format!("fp16: yes\nfsdp_config: {{{key}: 1}} # {key}\n"),
                false => format!("fp16: yes\nfsdp_config:\n  {key}: 1 # {key}: 2\n"),
            };
            if let Ok((config, _)) = Config::parse(&file, "any") {
                let (text, _) = update(&file, "any").unwrap();
                proptest::prop_assert!(config.is_of(&text), "{text}");
            }
        }
    }
}
