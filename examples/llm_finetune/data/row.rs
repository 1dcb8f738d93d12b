//! Rows of the data: conversations, prompts with completions, and plain texts.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::message::{Message, Role, parse_messages, wrong_type};
use super::reason::Reason;

/// Columns that are read. Others are ignored.
pub const COLUMNS: [&str; 7] =
    ["messages", "prompt", "completion", "text", "tools", "documents", "chat_template_kwargs"];

/// A row that is valid before its tokens are known.
#[derive(Clone, Debug)]
pub enum Row {
    /// A conversation.
    Chat(Chat),
    /// A prompt and the text after it, without a template.
    Completion {
        /// Text that is given.
        prompt: String,
        /// Text that is learned.
        completion: String,
    },
    /// A text that is learned, without a template.
    Text(String),
}

/// A conversation with at least one turn of the assistant that is learned.
#[derive(Clone, Debug)]
pub struct Chat {
    /// All messages.
    pub messages: Vec<Message>,
    /// Number of messages before the first one that may be learned.
    pub given: usize,
    /// Variables of the template beside the messages, such as `tools`.
    pub variables: Vec<(String, Value)>,
}

impl Row {
    /// Converts an object. It has `messages`, else `prompt` and `completion` (two texts or two
    /// lists of messages), else `text`. A conversation may have `tools` and `documents` (lists, or
    /// strings of JSON) and `chat_template_kwargs` (an object).
    ///
    /// # Errors
    ///
    /// If the object has none of these columns, or a column is empty or of a wrong type.
    pub fn parse(value: &Value) -> Result<Self, Reason> {
        if value.kind() != ValueKind::Map {
            return Err(wrong_type("the row".into(), value, "an object"));
        }
        let column = |name: &str| value.get_attr(name).ok().filter(has_value);
        if let Some(messages) = column("messages") {
            let messages = parse_messages(&messages, 1, "messages")?;
            return chat(messages, 0, value);
        }
        if let (Some(prompt), Some(completion)) = (column("prompt"), column("completion")) {
            if prompt.kind() == ValueKind::Seq {
                let mut messages = parse_messages(&prompt, 1, "prompt")?;
                let given = messages.len();
                messages.extend(parse_messages(&completion, given + 1, "completion")?);
                return chat(messages, given, value);
            }
            let completion = text(&completion, "`completion`", "a string")?;
            let prompt = string(&prompt, "`prompt`", "a string or a list of messages")?;
            return Ok(Self::Completion { prompt, completion });
        }
        match column("text") {
            Some(value) => Ok(Self::Text(text(&value, "`text`", "a string")?)),
            None => Err(Reason::Columns { found: names(value) }),
        }
    }
}

fn has_value(value: &Value) -> bool {
    !value.is_undefined() && !value.is_none()
}

fn chat(messages: Vec<Message>, given: usize, row: &Value) -> Result<Row, Reason> {
    if messages.is_empty() {
        return Err(Reason::Empty("the conversation"));
    }
    if messages[given..].iter().all(|message| message.role() != Role::Assistant) {
        return Err(Reason::NoAssistant);
    }
    let mut variables = Vec::new();
    for name in ["tools", "documents"] {
        if let Some(value) = row.get_attr(name).ok().filter(has_value) {
            variables.push((name.to_string(), list(value, name)?));
        }
    }
    if let Some(more) = row.get_attr("chat_template_kwargs").ok().filter(has_value) {
        let wrong = || wrong_type("`chat_template_kwargs`".into(), &more, "an object");
        let Some(object) = more.as_object().filter(|_| more.kind() == ValueKind::Map) else {
            return Err(wrong());
        };
        let pairs = object.try_iter_pairs().ok_or_else(wrong)?;
        variables.extend(pairs.map(|(name, value)| (name.to_string(), value)));
    }
    Ok(Row::Chat(Chat { messages, given, variables }))
}

/// Returns a list, which may be given as a string of JSON.
fn list(value: Value, name: &str) -> Result<Value, Reason> {
    let value = match value.as_str() {
        Some(json) => serde_json::from_str(json)
            .map_err(|error| Reason::Json(format!("column `{name}`: {error}")))?,
        None => value,
    };
    match value.kind() {
        ValueKind::Seq => Ok(value),
        _ => Err(wrong_type(format!("`{name}`"), &value, "a list")),
    }
}

fn string(value: &Value, what: &str, expected: &'static str) -> Result<String, Reason> {
    let text = value.as_str().ok_or_else(|| wrong_type(what.into(), value, expected))?;
    Ok(text.to_string())
}

fn text(value: &Value, what: &'static str, expected: &'static str) -> Result<String, Reason> {
    Some(string(value, what, expected)?).filter(|text| !text.is_empty()).ok_or(Reason::Empty(what))
}

fn names(row: &Value) -> String {
    let names = row.try_iter().into_iter().flatten().map(|name| format!("`{name}`"));
    let names: Vec<_> = names.collect();
    if names.is_empty() { "no column".into() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<Row, String> {
        let value: Value = serde_json::from_str(json).unwrap();
        Row::parse(&value).map_err(|reason| reason.to_string())
    }

    #[test]
    fn each_kind_of_row_is_read() {
        let Ok(Row::Chat(chat)) = parse(
            r#"{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}],
                "tools":"[{\"name\":\"t\"}]","prompt":"ignored","chat_template_kwargs":{"x":1}}"#,
        ) else {
            panic!()
        };
        assert_eq!((chat.messages.len(), chat.given), (2, 0));
        let variables: Vec<_> = chat.variables.iter().map(|(n, v)| format!("{n}={v}")).collect();
        assert_eq!(variables, ["tools=[{'name': 't'}]", "x=1"]);
        let Ok(Row::Chat(chat)) = parse(
            r#"{"prompt":[{"role":"user","content":"a"}],
                "completion":[{"role":"assistant","content":"b"}]}"#,
        ) else {
            panic!()
        };
        assert_eq!((chat.messages.len(), chat.given), (2, 1));
        let row = parse(r#"{"prompt":"","completion":"b"}"#).unwrap();
        assert!(matches!(row, Row::Completion { prompt, completion }
            if prompt.is_empty() && completion == "b"));
        assert!(matches!(parse(r#"{"text":"a"}"#).unwrap(), Row::Text(text) if text == "a"));
    }

    #[test]
    fn wrong_rows_are_refused() {
        let refused = |json: &str| parse(json).unwrap_err();
        assert!(refused("3").contains("the row is a number"));
        assert!(refused(r#"{"a":1,"prompt":"x"}"#).ends_with("it has `a`, `prompt`"));
        assert_eq!(refused(r#"{"messages":[]}"#), "the conversation is empty");
        assert!(refused(r#"{"messages":"x"}"#).contains("`messages` is a string"));
        let given = r#"{"prompt":[{"role":"assistant","content":"a"}],
            "completion":[{"role":"user","content":"b"}]}"#;
        assert_eq!(refused(given), "the conversation has no assistant turn");
        assert_eq!(refused(r#"{"text":""}"#), "`text` is empty");
        assert!(refused(r#"{"prompt":3,"completion":"b"}"#).contains("`prompt` is a number"));
        let tools = r#"{"messages":[{"role":"assistant","content":"b"}],"tools":"{"}"#;
        assert!(refused(tools).contains("column `tools`"), "{}", refused(tools));
    }
}
