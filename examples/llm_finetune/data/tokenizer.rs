//! Tokenizer and chat template of a Hugging Face folder.

use std::fmt;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use minijinja::Value;
use serde_json::Value as Json;
use sha2::{Digest, Sha256};
use tokenizers::Tokenizer;

use super::clock::Moment;
use super::message::Message;
use super::special_tokens::TokenizerConfig;
use super::template::ChatTemplate;

/// Tokenizer with its chat template and special tokens.
pub struct ChatTokenizer {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    eos: Vec<u32>,
    pad: u32,
    vocab_size: usize,
    /// Ids of a line break, for tokenizers that write a space before a text.
    line_break: Option<Vec<u32>>,
    fingerprint: [u8; 32],
}

impl ChatTokenizer {
    /// Reads `tokenizer.json`, and where they exist `tokenizer_config.json`, `chat_template.jinja`
    /// and `generation_config.json`. A template of its own file replaces that of the configuration.
    ///
    /// # Errors
    ///
    /// If a file cannot be read or is not valid; the error names the file.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        let tokenizer =
            std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let config = read_text(folder, "tokenizer_config.json")?.unwrap_or_else(|| "{}".into());
        let template = read_text(folder, "chat_template.jinja")?;
        let mut all = Self::from_parts(&tokenizer, &config, template.as_deref())
            .with_context(|| format!("in {}", folder.display()))?;
        if let Some(generation) = read_text(folder, "generation_config.json")? {
            all.add_eos(&generation)
                .with_context(|| format!("in {}/generation_config.json", folder.display()))?;
        }
        Ok(all)
    }

    /// Creates the tokenizer from the contents of `tokenizer.json`, `tokenizer_config.json` and
    /// `chat_template.jinja`.
    ///
    /// # Errors
    ///
    /// If one of them is not valid, or a special token has no id.
    pub fn from_parts(tokenizer: &[u8], config: &str, template: Option<&str>) -> Result<Self> {
        Self::at(tokenizer, config, template, Moment::now())
    }

    /// Creates the tokenizer as [`from_parts`](Self::from_parts), with `now` as the time for
    /// templates.
    ///
    /// # Errors
    ///
    /// Those of [`from_parts`](Self::from_parts).
    pub fn at(json: &[u8], config: &str, template: Option<&str>, now: Moment) -> Result<Self> {
        let mut tokenizer = Tokenizer::from_bytes(json)
            .map_err(|error| anyhow!("{error}"))
            .context("tokenizer.json")?;
        // Files may say how a text was cut or filled up when they were written.
        tokenizer.with_truncation(None).map_err(|error| anyhow!("{error}"))?;
        tokenizer.with_padding(None);
        let mut config = TokenizerConfig::parse(config).context("tokenizer_config.json")?;
        if let Some(template) = template {
            config.template = Some(template.into());
            config.tool_template = None;
        }
        let id = |name: &str| match config.token(name) {
            None => Ok(None),
            Some(token) => {
                let id = tokenizer.token_to_id(token);
                let id = id.with_context(|| format!("{name} {token:?} is not in the vocabulary"));
                id.map(Some)
            }
        };
        let eos = id("eos_token")?;
        // Padding is known by its place, so that any id will do.
        let pad = id("pad_token").unwrap_or_default().or(eos).unwrap_or(0);
        let last = tokenizer.get_vocab(true).into_values().max();
        let fingerprint = fingerprint(json, &config);
        let template = ChatTemplate::new(&config, now).context("chat template")?;
        Ok(Self {
            line_break: line_break(&tokenizer)?,
            vocab_size: last.map_or(0, |id| id as usize + 1),
            eos: eos.into_iter().collect(),
            tokenizer,
            template,
            pad,
            fingerprint,
        })
    }

    /// Adds the end tokens of `generation_config.json`: an id or a list of ids.
    fn add_eos(&mut self, generation: &str) -> Result<()> {
        let config: Json = serde_json::from_str(generation).context("not valid JSON")?;
        let value = &config["eos_token_id"];
        let values = match value {
            Json::Null => return Ok(()),
            Json::Array(values) => values.as_slice(),
            one => std::slice::from_ref(one),
        };
        for value in values {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            let id = id.with_context(|| format!("eos_token_id {value} is no id of a token"))?;
            if !self.eos.contains(&id) {
                self.eos.push(id);
            }
        }
        Ok(())
    }

    /// Returns the ids of a conversation that the assistant continues.
    ///
    /// # Errors
    ///
    /// If there is no chat template, or it refuses the messages.
    pub fn encode_prompt(&self, messages: &[Message]) -> Result<Vec<u32>> {
        ensure!(!messages.is_empty(), "a prompt needs at least one message");
        Ok(self.render(messages, &[], true)?.1)
    }

    /// Renders messages and returns the ids of the text, as transformers' `apply_chat_template`.
    ///
    /// # Errors
    ///
    /// If there is no chat template, or it refuses the messages.
    pub fn render(
        &self,
        messages: &[Message],
        variables: &[(String, Value)],
        add_generation_prompt: bool,
    ) -> Result<(String, Vec<u32>)> {
        let template = self.template.as_ref().context("the model's folder has no chat template")?;
        let rendered = template.render(messages, variables, add_generation_prompt);
        let text = rendered.context("chat template")?;
        let ids = self.encode_piece(&text, true)?;
        Ok((text, ids))
    }

    /// Returns the ids of a part of a rendered conversation, without special tokens around it.
    /// `is_first` says that the conversation begins with it: a tokenizer that writes a space before
    /// a text writes none before other parts.
    ///
    /// # Errors
    ///
    /// If the tokenizer refuses the text.
    pub fn encode_piece(&self, text: &str, is_first: bool) -> Result<Vec<u32>> {
        if let Some(line_break) = self.line_break.as_ref().filter(|_| !is_first) {
            let ids = encode(&self.tokenizer, &format!("\n{text}"), false)?;
            if let Some(ids) = ids.strip_prefix(line_break.as_slice()) {
                return Ok(ids.to_vec());
            }
        }
        encode(&self.tokenizer, text, false)
    }

    /// Returns the ids of a text of its own, with the special tokens that the tokenizer adds.
    ///
    /// # Errors
    ///
    /// If the tokenizer refuses the text.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>> {
        encode(&self.tokenizer, text, true)
    }

    /// Returns the text of ids, without special tokens.
    ///
    /// # Errors
    ///
    /// If the tokenizer refuses the ids.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.tokenizer.decode(ids, true).map_err(|error| anyhow!("tokenizer: {error}"))
    }

    /// Returns the chat template, or `None` if the folder has none.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// Returns the ids that end a generated text. The first is `eos_token`, if it is set.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos
    }

    /// Returns the id to fill rows with: `pad_token`, else `eos_token`, else 0.
    pub fn pad_id(&self) -> u32 {
        self.pad
    }

    /// Returns the largest id plus 1.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Returns the SHA-256 over the tokenizer, its special tokens and its templates.
    pub fn fingerprint(&self) -> &[u8; 32] {
        &self.fingerprint
    }
}

impl fmt::Debug for ChatTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTokenizer").field("vocab_size", &self.vocab_size).finish()
    }
}

fn read_text(folder: &Path, name: &str) -> Result<Option<String>> {
    let path = folder.join(name);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => bail!("cannot read {}: {error}", path.display()),
    }
}

fn encode(tokenizer: &Tokenizer, text: &str, special: bool) -> Result<Vec<u32>> {
    let encoding = tokenizer.encode_fast(text, special).map_err(|error| anyhow!("{error}"))?;
    Ok(encoding.get_ids().to_vec())
}

/// Returns the ids of a line break if the tokenizer writes a space before a text. In this case a
/// part of a text is tokenized after a line break, which is removed again.
fn line_break(tokenizer: &Tokenizer) -> Result<Option<Vec<u32>>> {
    let (line_break, alone) = (encode(tokenizer, "\n", false)?, encode(tokenizer, "a", false)?);
    let after = encode(tokenizer, "\na", false)?;
    let equal = after.strip_prefix(line_break.as_slice()) == Some(&alone);
    Ok((!equal).then_some(line_break))
}

fn fingerprint(tokenizer: &[u8], config: &TokenizerConfig) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(Sha256::digest(tokenizer));
    hash.update(Sha256::digest(format!("{config:?}")));
    hash.finalize().into()
}
