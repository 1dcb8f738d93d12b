//! Converts rows to tokens, with the tokens that count for the loss.

use super::reason::Reason;
use super::row::Row;
use super::spans::{self, Piece};
use super::tokenizer::ChatTokenizer;

/// How rows become tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Largest number of tokens of a row.
    pub max_length: usize,
    /// Whether a longer row is cut. Otherwise it is not used.
    pub truncate: bool,
    /// Whether all tokens count for the loss, and not only those of the assistant or the
    /// completion.
    pub train_on_prompt: bool,
}

/// Tokens of a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// Ids of the tokens.
    pub ids: Vec<u32>,
    /// Whether each token counts, as the target of the one before it. The first never does.
    pub counted: Vec<bool>,
}

/// Converts a row.
///
/// The parts of a conversation are tokenized one by one, so that each token belongs to one part and
/// a prompt has the ids that it has when text is generated. A completion and a text end with
/// `eos_token`, which counts.
///
/// # Errors
///
/// If the template or the tokenizer refuses the row, it is too long, or none of its tokens counts.
pub fn encode(
    tokenizer: &ChatTokenizer,
    row: &Row,
    options: &EncodeOptions,
) -> Result<Encoded, Reason> {
    let mut encoded = match row {
        Row::Chat(chat) => {
            let template = tokenizer.template().ok_or_else(|| {
                Reason::Template("the model's folder has none, and the row has messages".into())
            })?;
            let pieces = match options.train_on_prompt {
                true => spans::whole(template, chat)?,
                false => spans::pieces(template, chat)?,
            };
            encode_pieces(tokenizer, &pieces)?
        }
        Row::Completion { prompt, completion } => {
            encode_completion(tokenizer, prompt, completion, options.train_on_prompt)?
        }
        Row::Text(text) => {
            let ids = plain(tokenizer, text)?;
            let counted = vec![true; ids.len()];
            with_eos(tokenizer, Encoded { ids, counted })
        }
    };
    let tokens = encoded.ids.len();
    if tokens > options.max_length {
        if !options.truncate {
            return Err(Reason::TooLong { tokens, max: options.max_length });
        }
        encoded.ids.truncate(options.max_length);
        encoded.counted.truncate(options.max_length);
    }
    // Nothing before the first token predicts it.
    if let Some(first) = encoded.counted.first_mut() {
        *first = false;
    }
    if !encoded.counted.contains(&true) {
        return Err(Reason::NothingCounted);
    }
    Ok(encoded)
}

fn encode_pieces(tokenizer: &ChatTokenizer, pieces: &[Piece]) -> Result<Encoded, Reason> {
    let mut encoded = Encoded { ids: Vec::new(), counted: Vec::new() };
    for (index, piece) in pieces.iter().enumerate() {
        let ids = tokenizer.encode_piece(&piece.text, index == 0).map_err(refused)?;
        encoded.counted.resize(encoded.counted.len() + ids.len(), piece.counted);
        encoded.ids.extend(ids);
    }
    Ok(encoded)
}

fn encode_completion(
    tokenizer: &ChatTokenizer,
    prompt: &str,
    completion: &str,
    train_on_prompt: bool,
) -> Result<Encoded, Reason> {
    let mut ids = plain(tokenizer, prompt)?;
    // A tokenizer may end each text with `eos_token`. The prompt goes on.
    if !prompt.is_empty() && ids.last().is_some_and(|id| Some(id) == tokenizer.eos_ids().first()) {
        let bare = tokenizer.encode_piece(prompt, true).map_err(refused)?;
        if bare.last() != ids.last() {
            ids.pop();
        }
    }
    let mut counted = vec![train_on_prompt; ids.len()];
    let answer = tokenizer.encode_piece(completion, ids.is_empty()).map_err(refused)?;
    counted.resize(ids.len() + answer.len(), true);
    ids.extend(answer);
    Ok(with_eos(tokenizer, Encoded { ids, counted }))
}

/// Returns the ids that a text has by itself.
fn plain(tokenizer: &ChatTokenizer, text: &str) -> Result<Vec<u32>, Reason> {
    tokenizer.encode_text(text).map_err(refused)
}

/// Adds `eos_token`, if it is set and missing.
fn with_eos(tokenizer: &ChatTokenizer, mut encoded: Encoded) -> Encoded {
    if let Some(eos) = tokenizer.eos_ids().first().filter(|eos| encoded.ids.last() != Some(eos)) {
        encoded.ids.push(*eos);
        encoded.counted.push(true);
    }
    encoded
}

fn refused(error: anyhow::Error) -> Reason {
    Reason::Tokenizer(format!("{error:#}"))
}
