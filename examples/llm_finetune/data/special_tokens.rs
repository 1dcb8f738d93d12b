//! Special tokens and chat templates of `tokenizer_config.json`.

use anyhow::{Context, Result, bail};
use serde_json::Value as Json;

/// Names of special tokens that templates read.
const NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Settings of a tokenizer that `tokenizer.json` does not have.
#[derive(Clone, Debug, Default)]
pub struct TokenizerConfig {
    /// Names of special tokens, such as `eos_token`, and their texts. A token that is not set is
    /// left out.
    pub special: Vec<(&'static str, String)>,
    /// Chat template for conversations.
    pub template: Option<String>,
    /// Chat template for conversations with tools, where it is another one.
    pub tool_template: Option<String>,
}

impl TokenizerConfig {
    /// Parses `tokenizer_config.json`. Its `chat_template` is a text, or a list of objects with a
    /// `name` and a `template`, of which `default` and `tool_use` are used.
    ///
    /// # Errors
    ///
    /// If the text is no JSON object, or a value is of a wrong type.
    pub fn parse(json: &str) -> Result<Self> {
        let config: Json = serde_json::from_str(json).context("not valid JSON")?;
        let Json::Object(config) = config else { bail!("not a JSON object") };
        let mut special = Vec::new();
        for name in NAMES {
            if let Some(token) = token_text(config.get(name), name)? {
                special.push((name, token));
            }
        }
        let (mut template, mut tool_template) = (None, None);
        match config.get("chat_template") {
            None | Some(Json::Null) => {}
            Some(Json::String(text)) => template = Some(text.clone()),
            Some(Json::Array(named)) => {
                template = find_template(named, "default");
                tool_template = find_template(named, "tool_use");
                if template.is_none() {
                    bail!("`chat_template` has no template of the name `default`");
                }
            }
            Some(_) => bail!("`chat_template` is neither a text nor a list of templates"),
        }
        Ok(Self { special, template, tool_template })
    }

    /// Returns the text of a special token, or `None` if it is not set.
    pub fn token(&self, name: &str) -> Option<&str> {
        self.special.iter().find(|(known, _)| *known == name).map(|(_, token)| token.as_str())
    }
}

/// Returns the text of a token, which is given as a text or as an object with `content`.
fn token_text(value: Option<&Json>, name: &str) -> Result<Option<String>> {
    match value {
        None | Some(Json::Null) => Ok(None),
        Some(Json::String(text)) => Ok(Some(text.clone())),
        Some(Json::Object(token)) => match token.get("content") {
            Some(Json::String(text)) => Ok(Some(text.clone())),
            _ => bail!("`{name}` is an object without a text `content`"),
        },
        Some(_) => bail!("`{name}` is neither a text nor an object with a text `content`"),
    }
}

fn find_template(named: &[Json], name: &str) -> Option<String> {
    let found = named.iter().find(|template| template["name"] == name)?;
    Some(found["template"].as_str()?.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_and_templates_are_found_in_each_form() {
        let config = TokenizerConfig::parse(
            r#"{"bos_token":{"content":"<s>","lstrip":false},"eos_token":"</s>","pad_token":null,
                "chat_template":[{"name":"tool_use","template":"t"},
                                 {"name":"default","template":"d"}]}"#,
        )
        .unwrap();
        assert_eq!((config.token("bos_token"), config.token("pad_token")), (Some("<s>"), None));
        assert_eq!(config.special.len(), 2);
        assert_eq!(config.template.as_deref(), Some("d"));
        assert_eq!(config.tool_template.as_deref(), Some("t"));
        let config = TokenizerConfig::parse(r#"{"chat_template":"x"}"#).unwrap();
        assert_eq!((config.template.as_deref(), config.tool_template), (Some("x"), None));
    }

    #[test]
    fn wrong_types_are_refused() {
        for (json, expected) in [
            ("[]", "not a JSON object"),
            (r#"{"eos_token":3}"#, "`eos_token` is neither"),
            (r#"{"eos_token":{}}"#, "without a text `content`"),
            (r#"{"chat_template":1}"#, "`chat_template` is neither"),
            (r#"{"chat_template":[{"name":"x","template":""}]}"#, "no template of the name"),
        ] {
            let error = TokenizerConfig::parse(json).unwrap_err().to_string();
            assert!(error.contains(expected), "{json}: {error}");
        }
    }
}
