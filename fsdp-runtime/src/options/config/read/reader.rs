//! The [`Reader`]: the configuration read so far, its notes and problems, and values of one type.

use crate::options::ShardingStrategy;
use crate::options::config::error::{Note, Problem, ProblemKind};
use crate::options::config::nearest::nearest;
use crate::options::config::place::Place;
use crate::options::config::types::Config;
use crate::options::config::values::{Named, boolean};
use crate::options::config::yaml::{KeyValue, Value};

/// Key of the number of shard groups, whose place `agree.rs` needs.
pub(super) const REPLICATE: &str = "parallelism_config_dp_replicate_size";

/// State of reading a file: the values, notes and problems so far.
#[derive(Default)]
pub(super) struct Reader {
    pub(super) config: Config,
    pub(super) notes: Vec<Note>,
    pub(super) problems: Vec<Problem>,
    /// Value of `fp16`, which older files have instead of `mixed_precision`.
    pub(super) fp16: bool,
    /// Keys under `fsdp_config` with an older name, each with the newer name.
    pub(super) renamed: Vec<(&'static str, KeyValue)>,
    /// Value of `fsdp_sharding_strategy`.
    pub(super) strategy: Option<ShardingStrategy>,
    /// Value of `fsdp_reshard_after_forward`, the newer key for the strategy.
    pub(super) reshard: Option<Reshard>,
}

/// Value of `fsdp_reshard_after_forward`.
#[derive(Clone, Copy)]
pub(super) enum Reshard {
    /// A Boolean, as in files of `fsdp_version: 2`.
    After(bool),
    /// A strategy, as in files of `fsdp_version: 1`.
    Strategy(ShardingStrategy),
}

impl Reader {
    pub(super) fn problem(&mut self, place: Place, kind: ProblemKind) {
        self.problems.push(Problem { place: Some(place), kind });
    }

    /// Adds a problem: the value of `entry` is not `expected`.
    pub(super) fn wrong_value(&mut self, entry: &KeyValue, expected: impl Into<String>) {
        let (key, value) = (entry.key.clone(), entry.value.shown());
        self.problem(
            entry.value.place,
            ProblemKind::WrongValue { key, value, expected: expected.into() },
        );
    }

    /// Adds a problem: the value of `entry`, which is `text`, is not one of `valid`.
    pub(super) fn unknown_value(&mut self, entry: &KeyValue, text: &str, valid: Vec<&'static str>) {
        let (key, value) = (entry.key.clone(), entry.value.shown());
        let nearest = nearest(text, valid.iter().copied());
        self.problem(entry.value.place, ProblemKind::UnknownValue { key, value, nearest, valid });
    }

    /// Adds a note: `entry` has no effect. `off` marks the value that switches the option off.
    pub(super) fn note(&mut self, entry: &KeyValue, reason: impl Into<String>, off: bool) {
        self.notes.push(Note {
            place: entry.place,
            key: entry.key.clone(),
            value: entry.value.shown(),
            reason: reason.into(),
            off,
        });
    }

    /// Reads a text that is not empty.
    pub(super) fn text(&mut self, entry: &KeyValue) -> Option<String> {
        let text = entry.value.text().map(str::trim).filter(|text| !text.is_empty());
        if text.is_none() {
            self.wrong_value(entry, "a text");
        }
        text.map(str::to_string)
    }

    pub(super) fn bool(&mut self, entry: &KeyValue) -> Option<bool> {
        let value = entry.value.text().and_then(boolean);
        if value.is_none() {
            self.wrong_value(entry, "true or false");
        }
        value
    }

    /// Reads a whole number of at least `least`, which may be written as `1e8`.
    pub(super) fn count(&mut self, entry: &KeyValue, least: usize) -> Option<usize> {
        let value = entry.value.text().and_then(whole_number).filter(|value| *value >= least);
        if value.is_none() {
            self.wrong_value(entry, format!("a whole number of at least {least}"));
        }
        value
    }

    /// Reads a value that is a name of a fixed list. `parse` is [`Named::named`] or
    /// [`Named::named_or_numbered`].
    pub(super) fn named<T: Named>(
        &mut self,
        entry: &KeyValue,
        parse: fn(&str) -> Option<T>,
    ) -> Option<T> {
        let text = entry.value.text().unwrap_or_default().trim();
        let value = parse(text);
        if value.is_none() {
            self.unknown_value(entry, text, T::NAMES.to_vec());
        }
        value
    }

    /// Reads the value of `entry` into the field of `key`, which has the values of its option.
    /// Returns false if `key` is no such key.
    pub(super) fn plain_field(&mut self, key: &str, entry: &KeyValue) -> bool {
        let text = entry.value.text().unwrap_or_default();
        let Some(field) = self.config.fsdp.plain_field(key) else { return false };
        field.parse(text);
        match (field.text(), field.names()) {
            (Some(_), _) => {}
            (None, []) => self.wrong_value(entry, "true or false"),
            (None, names) => self.unknown_value(entry, text.trim(), names.to_vec()),
        }
        true
    }

    /// Reads the entries of a map with `read`.
    pub(super) fn map(&mut self, entry: &KeyValue, read: impl FnOnce(&mut Self, &[KeyValue])) {
        match &entry.value.value {
            Value::Map(entries) => read(self, entries),
            _ => self.wrong_value(entry, "indented lines of `key: value`"),
        }
    }
}

/// Parses a number without a fraction, such as `100000`, `100_000` or `1e5`.
fn whole_number(text: &str) -> Option<usize> {
    let text = text.trim().replace('_', "");
    if let Ok(number) = text.parse() {
        return Some(number);
    }
    let number: f64 = text.parse().ok()?;
    // Up to 2^53, about 9e15, an `f64` holds every whole number.
    let exact = number.fract() == 0.0 && (0.0..=9e15).contains(&number);
    exact.then_some(number as usize)
}
