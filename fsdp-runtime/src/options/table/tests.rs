//! Each option of the table has a builder, a key or a reason why there is none, a documented default
//! that is the actual one, and a range. Each field has a row.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::backend::DeviceKind;
use crate::options::config::Overrides;
use crate::options::{FsdpConfig, FsdpOptions};

/// The files with the builder methods.
const BUILDERS: [&str; 2] =
    [include_str!("../fsdp_options.rs"), include_str!("../unit_options.rs")];

fn names() -> Vec<&'static str> {
    TABLE.iter().map(|row| row.name).collect()
}

/// Returns the documentation of each builder method, by the name of the method.
fn builders() -> BTreeMap<&'static str, &'static str> {
    let mut found = BTreeMap::new();
    for item in BUILDERS.into_iter().flat_map(|source| source.split("\n\n")) {
        let Some((documentation, method)) = item.split_once("fn with_") else { continue };
        let start = item.len() - method.len() - "with_".len();
        let name = &item[start..];
        let end = name.find(['(', '<']).expect("parameters");
        assert!(documentation.contains("    pub "), "{}", &name[..end]);
        found.insert(&name[..end], documentation);
    }
    found
}

#[test]
fn every_option_has_a_builder_that_says_its_default() {
    let builders = builders();
    for row in TABLE {
        assert_eq!(row.builder, format!("with_{}", row.name));
        let documentation = builders.get(row.builder);
        let documentation = documentation.unwrap_or_else(|| panic!("no {}", row.builder));
        assert!(documentation.contains("Default:"), "{} says no default", row.builder);
    }
    assert_eq!(builders.len(), TABLE.len(), "a builder is not in the table: {builders:#?}");
}

#[test]
fn every_field_is_in_the_table() {
    // Fields are indented by one level, what they contain by more.
    let text = format!("{:#?}", FsdpOptions::new());
    let fields = text.lines().filter_map(|line| line.strip_prefix("    "));
    let fields = fields.filter(|line| line.starts_with(|first: char| first.is_ascii_lowercase()));
    let fields: Vec<&str> = fields.filter_map(|line| Some(line.split_once(": ")?.0)).collect();
    assert_eq!(fields, names());

    let config: BTreeMap<String, serde_json::Value> =
        serde_json::from_str(&FsdpConfig::new().to_string()).unwrap();
    let fields: BTreeSet<&str> = config.keys().map(String::as_str).collect();
    let saved = names().into_iter().filter(|name| *name != "ignored_params");
    assert_eq!(fields, saved.collect());
}

/// Returns the text of a default in the documentation, or `None` if it is described in words.
fn documented(name: &str, value: &str) -> Option<String> {
    let options = FsdpOptions::new();
    let reductions = |kind| options.reductions_in_flight(kind);
    match (name, value) {
        ("units_ahead", _) => Some(options.units_ahead().to_string()),
        ("reductions_in_flight", _) => Some(format!(
            "{} on Flex, {} on CUDA, else {}",
            reductions(DeviceKind::Flex),
            reductions(DeviceKind::Cuda),
            reductions(DeviceKind::Other)
        )),
        ("storage", _) => Some(options.storage_of(None, "").of(true).to_string()),
        ("offload", _) => Some(format!("`{value}`")),
        (_, "true") => Some("on".into()),
        (_, "false") => Some("off".into()),
        (_, "None" | "[]") => None,
        (_, value) if value.contains('{') => None,
        (_, value) if value.parse::<f64>().is_ok() => Some(value.into()),
        (_, value) => Some(format!("`{value}`")),
    }
}

#[test]
fn the_documented_defaults_are_the_actual_ones() {
    let options = FsdpOptions::new();
    let mut compared: BTreeMap<&str, String> =
        options.compared().into_iter().map(|(name, it)| (name, format!("{it:?}"))).collect();
    compared.insert("ignored_params", format!("{:?}", options.ignored_params));
    for row in TABLE {
        let (text, value) = (row.default_without_link(), &compared[row.name]);
        match documented(row.name, value) {
            Some(documented) => assert_eq!(text, documented, "{}", row.name),
            None => {
                let value = text == "on" || text.contains('`') || text.parse::<f64>().is_ok();
                assert!(!value && !text.is_empty(), "{}: {text} is no word", row.name);
            }
        }
        if let Some((_, link)) = row.default.split_once("](") {
            assert!(link.ends_with(&format!("::{value})")), "{}: {link}", row.name);
        }
    }
}

#[test]
fn every_option_has_a_range_and_a_line_of_help() {
    for row in TABLE {
        for text in [row.range, row.help] {
            assert!(!text.is_empty() && !text.ends_with('.') && !text.contains('\n'), "{text}");
        }
    }
}

#[test]
fn every_option_has_a_key_or_a_reason() {
    let mut known = BTreeSet::new();
    for row in TABLE {
        match row.keys {
            Keys::NotInFile(reason) => assert!(reason.len() > 10, "{}: {reason}", row.name),
            Keys::InFile(keys) => assert!(!keys.is_empty(), "{} has no key", row.name),
        }
        for key in row.file_keys() {
            assert!(known.insert(key.name), "{} is in two rows", key.name);
            assert!(!key.help.is_empty() && key.value != Some(""), "{key:?}");
            Overrides::default().set(key.name, "1").unwrap_or_else(|error| panic!("{error}"));
            let newer = |name| row.file_keys().iter().find(|other| other.name == name);
            let found = key.same_as.is_none_or(|name| newer(name).is_some());
            assert!(found && (key.same_as.is_some() || !key.renamed), "{key:?}");
        }
    }
}

#[test]
fn settings_of_single_units_belong_to_an_option() {
    for row in TABLE.iter().filter(|row| row.is_of_units()) {
        let general =
            TABLE.iter().filter(|general| general.of_units().any(|of| of.name == row.name));
        assert_eq!(general.count(), 1, "{}", row.name);
    }
    let with: Vec<&str> =
        TABLE.iter().filter(|row| row.of_units().count() == 2).map(|row| row.name).collect();
    let expected = [
        "reshard_after_forward",
        "forward_prefetch",
        "backward_prefetch",
        "mixed_precision",
        "buffer_dtype",
        "storage",
    ];
    assert_eq!(with, expected);
}

/// Ranks compare these lines one by one.
#[test]
fn the_strategy_and_the_seed_are_compared_first() {
    let lines = FsdpOptions::new().with_seed(7).fingerprint_lines();
    assert_eq!(lines[..2], ["option strategy: FullShard", "option seed: Some(7)"]);
    let lines: BTreeSet<&str> =
        lines.iter().filter_map(|line| line.strip_prefix("option ")?.split(':').next()).collect();
    assert_eq!(lines, names().into_iter().filter(|name| *name != "ignored_params").collect());
}
