//! JSON as Python's `json.dumps` writes it, for the filter `tojson` of chat templates.

use std::fmt::Write;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::python_text;

/// Options of `json.dumps`.
#[derive(Clone, Debug)]
struct Options {
    ensure_ascii: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// Filter `tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`, as
/// transformers defines it. In contrast to Jinja's own, it does not escape HTML.
///
/// # Errors
///
/// If an argument is unknown or of a wrong type, or a value has no JSON.
pub fn tojson(value: &Value, rest: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let argument = |at: usize, name: &str| -> Result<Value, Error> {
        match rest.get(at) {
            Some(value) => Ok(value.clone()),
            None => Ok(named.get::<Option<Value>>(name)?.unwrap_or_default()),
        }
    };
    let ensure_ascii = argument(0, "ensure_ascii")?.is_true();
    let indent = indent(&argument(1, "indent")?)?;
    let separators = argument(2, "separators")?;
    let sort_keys = argument(3, "sort_keys")?.is_true();
    named.assert_all_used()?;
    let default = (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string());
    let (item_separator, key_separator) =
        if is_given(&separators) { pair(&separators)? } else { default };
    let options = Options { ensure_ascii, indent, item_separator, key_separator, sort_keys };
    let mut text = String::new();
    write_value(&mut text, value, &options, 0)?;
    Ok(text)
}

fn is_given(value: &Value) -> bool {
    !value.is_none() && !value.is_undefined()
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Returns the indentation of one level: a text, or a number of spaces.
fn indent(value: &Value) -> Result<Option<String>, Error> {
    if !is_given(value) {
        return Ok(None);
    }
    if let Some(text) = value.as_str() {
        return Ok(Some(text.into()));
    }
    let spaces = value.as_usize().filter(|spaces| *spaces <= 64);
    let spaces = spaces.ok_or_else(|| invalid("tojson: indent is a text or 0 to 64"))?;
    Ok(Some(" ".repeat(spaces)))
}

fn pair(separators: &Value) -> Result<(String, String), Error> {
    let both: Vec<Value> = separators.try_iter()?.collect();
    match both.as_slice() {
        [item, key] => Ok((item.to_string(), key.to_string())),
        _ => Err(invalid("tojson: separators are two texts")),
    }
}

fn write_value(
    text: &mut String,
    value: &Value,
    options: &Options,
    depth: usize,
) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None => text.push_str("null"),
        ValueKind::Bool => text.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number if value.is_integer() => text.push_str(&value.to_string()),
        ValueKind::Number => text.push_str(&number(f64::try_from(value.clone())?)),
        ValueKind::String => write_string(text, value.as_str().unwrap_or_default(), options),
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter()?.map(|item| (None, item)).collect();
            write_items(text, ['[', ']'], items, options, depth)?;
        }
        ValueKind::Map => {
            let mut items = Vec::new();
            for key in value.try_iter()? {
                items.push((Some(key_text(&key)), value.get_item(&key)?));
            }
            if options.sort_keys {
                items.sort_by(|a, b| a.0.cmp(&b.0));
            }
            write_items(text, ['{', '}'], items, options, depth)?;
        }
        kind => return Err(invalid(format!("tojson: a value of type {kind} has no JSON"))),
    }
    Ok(())
}

fn write_items(
    text: &mut String,
    [open, close]: [char; 2],
    items: Vec<(Option<String>, Value)>,
    options: &Options,
    depth: usize,
) -> Result<(), Error> {
    text.push(open);
    let new_line = |text: &mut String, depth: usize| {
        if let Some(indent) = options.indent.as_ref().filter(|_| !items.is_empty()) {
            text.push('\n');
            text.push_str(&indent.repeat(depth));
        }
    };
    for (index, (key, value)) in items.iter().enumerate() {
        if index > 0 {
            text.push_str(&options.item_separator);
        }
        new_line(text, depth + 1);
        if let Some(key) = key {
            write_string(text, key, options);
            text.push_str(&options.key_separator);
        }
        write_value(text, value, options, depth + 1)?;
    }
    new_line(text, depth);
    text.push(close);
    Ok(())
}

fn key_text(key: &Value) -> String {
    match key.kind() {
        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.into(),
        ValueKind::None => "null".into(),
        _ => key.to_string(),
    }
}

/// Formats a number, also one that JSON does not have, as Python does.
fn number(number: f64) -> String {
    match number {
        _ if number.is_finite() => python_text::float(number),
        _ if number.is_nan() => "NaN".into(),
        _ if number > 0.0 => "Infinity".into(),
        _ => "-Infinity".into(),
    }
}

fn write_string(text: &mut String, string: &str, options: &Options) {
    text.push('"');
    for character in string.chars() {
        match character {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\u{8}' => text.push_str("\\b"),
            '\u{c}' => text.push_str("\\f"),
            ' '..='~' => text.push(character),
            '\u{7f}' => text.push(character),
            _ if character < ' ' || options.ensure_ascii => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    // Writing to a string does not fail.
                    let _ = write!(text, "\\u{unit:04x}");
                }
            }
            _ => text.push(character),
        }
    }
    text.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(template: &str) -> Result<String, Error> {
        let mut environment = minijinja::Environment::new();
        environment.add_filter("tojson", tojson);
        let value: Value = serde_json::from_str(
            r#"{"b":[1,2.0,1e-5,1e16,null,true],"a":{"é<\"\n\u0001😀":[],"x":{}}}"#,
        )
        .unwrap();
        environment.render_str(template, minijinja::context! { value })
    }

    // The expected texts are those of Python 3.11's `json.dumps`.
    #[test]
    fn the_text_is_that_of_python() {
        let list = "[1, 2.0, 1e-05, 1e+16, null, true]";
        assert_eq!(
            render("{{ value|tojson }}").unwrap(),
            format!("{{\"b\": {list}, \"a\": {{\"é<\\\"\\n\\u0001😀\": [], \"x\": {{}}}}}}")
        );
        assert_eq!(
            render("{{ value|tojson(ensure_ascii=true, sort_keys=True) }}").unwrap(),
            format!(
                "{{\"a\": {{\"x\": {{}}, \"\\u00e9<\\\"\\n\\u0001\\ud83d\\ude00\": []}}, \
                 \"b\": {list}}}"
            )
        );
    }

    #[test]
    fn indentation_and_separators_are_followed() {
        assert_eq!(
            render("{{ {'a': [1, {}], 'b': []}|tojson(indent=2) }}").unwrap(),
            "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": []\n}"
        );
        let compact = render("{{ {'a': [1, 2]}|tojson(separators=(',', ':')) }}").unwrap();
        assert_eq!(compact, "{\"a\":[1,2]}");
        assert_eq!(render("{{ [1]|tojson(false, 1) }}").unwrap(), "[\n 1\n]");
        assert!(render("{{ 1|tojson(other=1) }}").is_err());
        assert!(render("{{ missing|tojson }}").is_err());
    }
}
