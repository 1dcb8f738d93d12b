//! A setting of each adapter, as one common value and patterns for the others.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::names::target_modules;

/// The values of a setting by the keys of the adapted modules.
#[derive(Debug)]
pub(super) struct Shares<'a> {
    values: Vec<(&'a str, f64)>,
    /// The value that most modules have; of several the one that comes first.
    pub(super) common: f64,
}

impl<'a> Shares<'a> {
    /// Returns the values of modules, of which there is one at least.
    pub(super) fn new(values: impl Iterator<Item = (&'a str, f64)>) -> Self {
        let values: Vec<_> = values.collect();
        let count = |value: f64| values.iter().filter(|(_, other)| *other == value).count();
        // `max_by_key` returns the last of several.
        let common = values.iter().rev().max_by_key(|(_, value)| count(*value));
        let common = common.map_or(0.0, |(_, value)| *value);
        Self { values, common }
    }

    /// Returns patterns of the modules with another value, as PEFT's `rank_pattern` has them. No module
    /// matches two of them.
    pub(super) fn patterns(&self) -> Value {
        let keys = |of: &dyn Fn(f64) -> bool| -> BTreeSet<&str> {
            self.values.iter().filter(|(_, value)| of(*value)).map(|(key, _)| *key).collect()
        };
        let all = keys(&|_| true);
        let mut patterns = Map::new();
        for (_, value) in self.values.iter().filter(|(_, value)| *value != self.common) {
            for name in target_modules(&keys(&|other| other == *value), &all) {
                patterns.insert(name, number(*value));
            }
        }
        Value::Object(patterns)
    }
}

/// Returns a number of JSON; a whole number is written as one, as PEFT does.
pub(super) fn number(value: f64) -> Value {
    match value.fract() == 0.0 && value.abs() < 1e15 {
        true => json!(value as i64),
        false => json!(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_of_most_modules_is_the_common_one() {
        let values = [
            ("layers.0.query", 4.0),
            ("layers.0.value", 8.0),
            ("layers.1.query", 4.0),
            ("layers.1.value", 2.5),
        ];
        let shares = Shares::new(values.into_iter());
        assert_eq!(shares.common, 4.0);
        let expected = json!({ "0.value": 8, "1.value": 2.5 });
        assert_eq!(shares.patterns(), expected);
        let shares = Shares::new(values[..2].iter().copied());
        assert_eq!((shares.common, shares.patterns()), (4.0, json!({ "value": 8 })));
    }
}
