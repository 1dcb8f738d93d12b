//! Messages of a conversation, as chat templates read them.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::reason::Reason;

/// Names under which a message may have its reasoning. The first is the one that templates read.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Instructions for the whole conversation.
    System,
    /// Instructions, under the name that newer models use.
    Developer,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// Result of a tool that the assistant called.
    Tool,
}

/// A message: its role, and all its keys for the template.
#[derive(Clone, Debug)]
pub struct Message {
    role: Role,
    value: Value,
}

impl Role {
    /// Names of all roles, for error messages.
    const KNOWN: &str = "system, developer, user, assistant, tool";

    /// Returns the name, as in the data.
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Developer => "developer",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }

    fn parse(name: &str) -> Option<Self> {
        let all = [Self::System, Self::Developer, Self::User, Self::Assistant, Self::Tool];
        all.into_iter().find(|role| role.name() == name)
    }
}

impl Message {
    /// Creates a message of text.
    pub fn new(role: Role, content: &str) -> Self {
        let value = Value::from_pairs([("role", role.name()), ("content", content)]);
        Self { role, value }
    }

    /// Converts message `number` of a row, from 1. Keys without a value are left out, and reasoning
    /// is found under each name that templates read, as transformers does.
    ///
    /// # Errors
    ///
    /// If the message is no object, has no known role, or has a content of a wrong type.
    pub fn parse(value: &Value, number: usize) -> Result<Self, Reason> {
        let what = |key: &str| format!("message {number}{key}");
        if value.kind() != ValueKind::Map {
            return Err(wrong_type(what(""), value, "an object"));
        }
        let pairs = pairs(value)?;
        let find = |key: &str| pairs.iter().find(|(name, _)| name == key).map(|(_, value)| value);
        let role = find("role").cloned().unwrap_or_default();
        let name = role.as_str().ok_or_else(|| wrong_type(what(": role"), &role, "a string"))?;
        let role = Role::parse(name).ok_or_else(|| Reason::Role {
            message: number,
            role: name.into(),
            known: Role::KNOWN,
        })?;
        check_content(find("content"), find("tool_calls"), role, &what(": content"))?;
        let reasoning = REASONING.iter().find_map(|key| find(key)).cloned();
        Ok(Self { role, value: Value::from_pairs(with_reasoning(pairs, reasoning)) })
    }

    /// Returns the author.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Returns the message as a template reads it.
    pub fn value(&self) -> &Value {
        &self.value
    }
}

/// Converts a list of messages, the first of which has this number in its row, from 1. `what` is
/// the name of the list.
///
/// # Errors
///
/// If the value is no list, or one of its elements is no message.
pub fn parse_messages(value: &Value, first: usize, what: &str) -> Result<Vec<Message>, Reason> {
    if value.kind() != ValueKind::Seq {
        return Err(wrong_type(format!("`{what}`"), value, "a list"));
    }
    let elements = value.try_iter().map_err(|error| Reason::Json(error.to_string()))?;
    elements.enumerate().map(|(at, message)| Message::parse(&message, first + at)).collect()
}

/// Creates the reason for a value of a wrong type.
pub fn wrong_type(what: String, value: &Value, expected: &'static str) -> Reason {
    let found = match value.kind() {
        ValueKind::Undefined => "missing",
        ValueKind::None => "null",
        ValueKind::Bool => "a boolean",
        ValueKind::Number => "a number",
        ValueKind::String => "a string",
        ValueKind::Seq | ValueKind::Iterable => "a list",
        ValueKind::Map => "an object",
        _ => "of an unknown type",
    };
    Reason::Type { what, found, expected }
}

/// Returns the keys and values of a message that have a value.
fn pairs(value: &Value) -> Result<Vec<(String, Value)>, Reason> {
    let keys = value.try_iter().map_err(|error| Reason::Json(error.to_string()))?;
    let pairs = keys.map(|key| {
        let value = value.get_item(&key).map_err(|error| Reason::Json(error.to_string()))?;
        Ok((key.to_string(), value))
    });
    let kept = pairs.filter(|pair| !matches!(pair, Ok((_, value)) if value.is_none()));
    kept.collect()
}

fn check_content(
    content: Option<&Value>,
    tool_calls: Option<&Value>,
    role: Role,
    what: &str,
) -> Result<(), Reason> {
    let valid = |content: &Value| matches!(content.kind(), ValueKind::String | ValueKind::Seq);
    match content {
        Some(content) if valid(content) => Ok(()),
        None if role == Role::Assistant && tool_calls.is_some() => Ok(()),
        other => {
            let found = other.cloned().unwrap_or_default();
            Err(wrong_type(what.into(), &found, "a string or a list"))
        }
    }
}

fn with_reasoning(pairs: Vec<(String, Value)>, reasoning: Option<Value>) -> Vec<(String, Value)> {
    let Some(reasoning) = reasoning else { return pairs };
    let has = |key: &str| pairs.iter().any(|(name, _)| name == key);
    let missing = |key: &str| (!has(key)).then(|| (key.to_string(), reasoning.clone()));
    let (first, last) = (missing("thinking"), missing("reasoning_content"));
    first.into_iter().chain(pairs).chain(last).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<Message, String> {
        let value: Value = serde_json::from_str(json).unwrap();
        Message::parse(&value, 2).map_err(|reason| reason.to_string())
    }

    #[test]
    fn a_message_keeps_its_keys_in_their_order() {
        let message = parse(r#"{"role":"tool","z":[1,{"b":1,"a":2}],"content":"x","name":null}"#);
        let message = message.unwrap();
        assert_eq!(message.role(), Role::Tool);
        let text = message.value().to_string();
        assert_eq!(text, "{'role': 'tool', 'z': [1, {'b': 1, 'a': 2}], 'content': 'x'}");
    }

    #[test]
    fn reasoning_has_each_name_that_templates_read() {
        let message = parse(r#"{"role":"assistant","content":"x","reasoning":"r"}"#).unwrap();
        assert_eq!(
            message.value().to_string(),
            "{'thinking': 'r', 'role': 'assistant', 'content': 'x', 'reasoning': 'r', \
             'reasoning_content': 'r'}"
        );
    }

    #[test]
    fn wrong_messages_are_refused() {
        let refused = |json: &str| parse(json).unwrap_err();
        assert!(refused(r#"{"role":"bot","content":"x"}"#).contains("unknown role \"bot\""));
        let reason = refused(r#"{"role":"user","content":3}"#);
        assert_eq!(reason, "message 2: content is a number, where a string or a list is expected");
        assert!(refused(r#"{"role":"user","tool_calls":[]}"#).contains("content is missing"));
        assert!(refused(r#"{"content":"x"}"#).contains("role is missing"));
        assert!(refused(r#"[1]"#).contains("message 2 is a list, where an object is expected"));
        assert!(parse(r#"{"role":"assistant","content":null,"tool_calls":[]}"#).is_ok());
    }
}
