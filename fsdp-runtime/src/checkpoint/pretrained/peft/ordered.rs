//! A JSON object whose order counts.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;

/// The names and values of a JSON object, in the order of the text. `null` is empty.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Ordered(Vec<(String, Value)>);

impl Ordered {
    /// Returns the names, each with its value read by `read`.
    ///
    /// # Errors
    ///
    /// A description of a value of the setting that cannot be read.
    pub(super) fn values<T>(
        self,
        setting: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Vec<(String, T)>, String> {
        let read = |(name, value): (String, Value)| match read(&value) {
            Some(number) => Ok((name, number)),
            None => Err(format!("`{setting}` gives `{name}` {value}, which is no such number")),
        };
        self.0.into_iter().map(read).collect()
    }
}

impl<'de> Deserialize<'de> for Ordered {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Ordered;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object or null")
            }

            fn visit_unit<E>(self) -> Result<Ordered, E> {
                Ok(Ordered::default())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Ordered, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Ordered(entries))
            }
        }

        deserializer.deserialize_any(Entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_that_of_the_text() {
        let read = |text: &str| serde_json::from_str::<Ordered>(text).unwrap();
        let values = read(r#"{"b": 1, "a": 2}"#).values("rank_pattern", Value::as_u64).unwrap();
        assert_eq!(values, [("b".to_string(), 1), ("a".to_string(), 2)]);
        assert_eq!(read("null"), Ordered::default());
        let error = read(r#"{"b": "x"}"#).values("rank_pattern", Value::as_u64).unwrap_err();
        assert_eq!(error, "`rank_pattern` gives `b` \"x\", which is no such number");
    }
}
