//! YAML as a tree with line numbers.
//!
//! The parser is `saphyr-parser`. This file builds the tree from its events, and refuses what no
//! configuration file needs: aliases, several documents, keys that are not scalars.

use saphyr_parser::{Event, Marker, Parser, ScalarStyle, ScanError};

use super::place::Place;

/// Maximum nesting of values. Configuration files need three levels; the bound keeps recursion
/// short.
const MAX_DEPTH: usize = 16;

/// A value and the place at which it begins.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Node {
    pub(super) place: Place,
    pub(super) value: Value,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    /// `plain` is false for a quoted scalar, which is a string even if it looks like another type.
    Scalar {
        text: String,
        plain: bool,
    },
    List(Vec<Node>),
    Map(Vec<KeyValue>),
}

/// A key with its value. A map keeps entries with equal keys.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct KeyValue {
    pub(super) key: String,
    pub(super) place: Place,
    pub(super) value: Node,
}

/// Text that is not YAML, or YAML that no configuration file needs. Line and column are counted
/// from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SyntaxError {
    pub(super) line: usize,
    pub(super) column: usize,
    pub(super) message: String,
}

impl Node {
    /// Returns the text of a scalar; `None` for null, lists and maps.
    pub(super) fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Scalar { text, .. } if !self.is_null() => Some(text),
            _ => None,
        }
    }

    /// Returns whether the value is `null`, `~` or missing.
    pub(super) fn is_null(&self) -> bool {
        matches!(&self.value, Value::Scalar { text, plain: true }
            if matches!(text.as_str(), "" | "~" | "null" | "Null" | "NULL"))
    }

    /// Returns the value as error messages show it. The contents of lists and maps are left out.
    pub(super) fn shown(&self) -> String {
        match &self.value {
            Value::Scalar { .. } if self.is_null() => "null".into(),
            Value::Scalar { text, .. } => text.clone(),
            Value::List(items) if items.is_empty() => "[]".into(),
            Value::List(_) => "[..]".into(),
            Value::Map(entries) if entries.is_empty() => "{}".into(),
            Value::Map(_) => "{..}".into(),
        }
    }
}

/// Parses a text of one document. Returns `None` if the document is empty.
pub(super) fn parse(text: &str) -> Result<Option<Node>, SyntaxError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    Tree { parser: Parser::new_from_str(text) }.document()
}

struct Tree<'a> {
    parser: Parser<'a, saphyr_parser::StrInput<'a>>,
}

fn error_at(mark: &Marker, message: impl Into<String>) -> SyntaxError {
    SyntaxError { line: mark.line().max(1), column: mark.col() + 1, message: message.into() }
}

impl<'a> Tree<'a> {
    fn next(&mut self) -> Result<Option<(Event<'a>, Marker)>, SyntaxError> {
        let error = |error: ScanError| error_at(error.marker(), error.info());
        match self.parser.next_event() {
            Some(event) => event.map(|(event, span)| Some((event, span.start))).map_err(error),
            None => Ok(None),
        }
    }

    fn document(mut self) -> Result<Option<Node>, SyntaxError> {
        let mut root = None;
        while let Some((event, mark)) = self.next()? {
            match event {
                Event::DocumentStart(_) if root.is_some() => {
                    return Err(error_at(&mark, "a second document; a file can hold only one"));
                }
                Event::Nothing
                | Event::StreamStart
                | Event::StreamEnd
                | Event::DocumentStart(_)
                | Event::DocumentEnd => {}
                event => root = Some(self.node(event, &mark, 0)?),
            }
        }
        Ok(root.filter(|root| !root.is_null()))
    }

    fn node(&mut self, event: Event<'a>, mark: &Marker, depth: usize) -> Result<Node, SyntaxError> {
        if depth > MAX_DEPTH {
            return Err(error_at(mark, "nested too deeply"));
        }
        let value = match event {
            Event::Scalar(text, style, ..) => {
                Value::Scalar { text: text.into_owned(), plain: style == ScalarStyle::Plain }
            }
            Event::SequenceStart(..) => Value::List(self.list(depth)?),
            Event::MappingStart(..) => Value::Map(self.map(depth)?),
            Event::Alias(_) => {
                return Err(error_at(mark, "an alias; write the value itself in its place"));
            }
            _ => return Err(error_at(mark, "a value was expected here")),
        };
        Ok(Node { place: Place::Line(mark.line()), value })
    }

    fn list(&mut self, depth: usize) -> Result<Vec<Node>, SyntaxError> {
        let mut items = Vec::new();
        loop {
            match self.next()? {
                None | Some((Event::SequenceEnd, _)) => return Ok(items),
                Some((event, mark)) => items.push(self.node(event, &mark, depth + 1)?),
            }
        }
    }

    fn map(&mut self, depth: usize) -> Result<Vec<KeyValue>, SyntaxError> {
        let mut entries = Vec::new();
        loop {
            let (key, mark) = match self.next()? {
                None | Some((Event::MappingEnd, _)) => return Ok(entries),
                Some((Event::Scalar(key, ..), mark)) => (key.into_owned(), mark),
                Some((_, mark)) => return Err(error_at(&mark, "a key must be a plain word")),
            };
            let Some((event, value)) = self.next()? else { return Ok(entries) };
            let value = self.node(event, &value, depth + 1)?;
            entries.push(KeyValue { key, place: Place::Line(mark.line()), value });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_values_know_their_lines() {
        let text = "# first\na: 1\n\nb:\n  c: 'no'\n  d: [x, y]\n";
        let Some(Node { value: Value::Map(top), .. }) = parse(text).unwrap() else { panic!() };
        let first = (top[0].key.as_str(), top[0].place, top[0].value.text());
        assert_eq!(first, ("a", Place::Line(2), Some("1")));
        assert_eq!((top[1].key.as_str(), top[1].place), ("b", Place::Line(4)));
        let Value::Map(inner) = &top[1].value.value else { panic!() };
        assert_eq!(inner[0].place, Place::Line(5));
        assert_eq!(inner[0].value.value, Value::Scalar { text: "no".into(), plain: false });
        assert_eq!(inner[1].value.shown(), "[..]");
    }

    #[test]
    fn what_is_no_configuration_is_refused_with_its_place() {
        for (text, line, part) in [
            ("a: 1\nb: [1, 2\n", 3, ""),
            ("a: 1\n  b: 2\n", 2, ""),
            ("a: &x 1\nb: *x\n", 2, "alias"),
            ("a: 1\n---\nb: 2\n", 2, "second document"),
            ("? [a]\n: 1\n", 1, "key"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.message.contains(part), "{error:?}");
            assert!(error.line.abs_diff(line) <= 1, "{text:?}: {error:?}");
        }
        let deep = format!("a: {}1{}", "[".repeat(200), "]".repeat(200));
        assert!(parse(&deep).unwrap_err().message.contains("deep"));
        assert_eq!(parse("# nothing\n"), Ok(None));
        assert_eq!(parse(""), Ok(None));
    }
}
