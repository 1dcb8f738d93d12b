//! The model and the conversations of a run without `--model` and `--data`. They are in the program.

use std::path::Path;

use anyhow::Result;

use crate::config::ModelConfig;
use crate::data::{ChatTokenizer, Source};
use crate::job::Model;

const CONFIG: &str = include_str!("tiny/config.json");
const GENERATION_CONFIG: &str = include_str!("tiny/generation_config.json");
const TOKENIZER: &[u8] = include_bytes!("tiny/tokenizer.json");
const TOKENIZER_CONFIG: &str = include_str!("tiny/tokenizer_config.json");
const TEMPLATE: &str = include_str!("tiny/chat_template.jinja");
const CONVERSATIONS: &[u8] = include_bytes!("tiny/chat.jsonl");

/// Returns the tiny model, which has no weights yet.
///
/// # Errors
///
/// If a file in the program is damaged.
pub fn model() -> Result<Model> {
    let files = [
        ("config.json", CONFIG.as_bytes()),
        ("generation_config.json", GENERATION_CONFIG.as_bytes()),
        ("tokenizer.json", TOKENIZER),
        ("tokenizer_config.json", TOKENIZER_CONFIG.as_bytes()),
        ("chat_template.jinja", TEMPLATE.as_bytes()),
    ];
    Ok(Model {
        config: ModelConfig::parse(CONFIG, Path::new("tiny/config.json"))?,
        tokenizer: ChatTokenizer::from_parts(TOKENIZER, TOKENIZER_CONFIG, Some(TEMPLATE))?,
        files: files.map(|(name, contents)| (name.to_string(), contents.to_vec())).to_vec(),
        weights: None,
    })
}

/// Returns the conversations.
pub fn conversations() -> Source {
    Source::Embedded { name: "tiny/chat.jsonl", contents: CONVERSATIONS }
}
