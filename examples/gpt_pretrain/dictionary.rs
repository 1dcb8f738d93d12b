//! fairseq's dictionary: the file `dict.txt` of a folder that fairseq-preprocess has written.
//!
//! A line has a word piece, a space and the number of times that it occurs. The ids of the word pieces
//! are the numbers of the lines, after fairseq's own four word pieces.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

/// fairseq's word pieces before those of the file: begin, padding, end and unknown.
const SPECIAL: [&str; 4] = ["<s>", "<pad>", "</s>", "<unk>"];
/// Flag of a line whose word piece is one of fairseq's own, or one of an earlier line.
const OVERWRITE: &str = "#fairseq:overwrite";

/// What is wrong with a dictionary. Lines are counted from 1.
#[derive(Debug, thiserror::Error)]
pub enum DictionaryError {
    /// A file that cannot be read, or is not UTF-8.
    #[error("cannot read the dictionary")]
    Io(#[from] io::Error),
    /// A line of another form.
    #[error("line {line}, {found:?}, is not a word piece, a space and its count")]
    Form { line: usize, found: String },
    /// A word piece in two lines.
    #[error("lines {first} and {line} have the same word piece, {piece:?}")]
    Repeated { first: usize, line: usize, piece: String },
    /// A word piece that fairseq has already.
    #[error(
        "line {line} has the word piece {piece:?}, which is one of fairseq's own; \
         `{OVERWRITE}` at its end allows that"
    )]
    Special { line: usize, piece: String },
}

/// Returns the number of word pieces of a dictionary, fairseq's own included.
///
/// # Errors
///
/// If the file cannot be read, or a line has not the form of a dictionary's.
pub fn vocabulary(path: &Path) -> Result<usize, DictionaryError> {
    let mut pieces: HashMap<String, usize> = HashMap::new();
    let mut len = SPECIAL.len();
    for (line, text) in BufReader::new(File::open(path)?).lines().enumerate() {
        let (line, text) = (line + 1, text?);
        let (piece, overwrites) =
            piece(&text).ok_or_else(|| DictionaryError::Form { line, found: text.clone() })?;
        if !overwrites {
            let piece = piece.to_string();
            if SPECIAL.contains(&piece.as_str()) {
                return Err(DictionaryError::Special { line, piece });
            }
            if let Some(&first) = pieces.get(&piece) {
                return Err(DictionaryError::Repeated { first, line, piece });
            }
        }
        pieces.entry(piece.to_string()).or_insert(line);
        len += 1;
    }
    Ok(len)
}

/// Returns the word piece of a line, and whether it may be one that exists.
fn piece(line: &str) -> Option<(&str, bool)> {
    let line = line.trim_end();
    let (fields, overwrites) = match line.strip_suffix(OVERWRITE) {
        Some(fields) => (fields.strip_suffix(' ')?, true),
        None => (line, false),
    };
    let (piece, count) = fields.rsplit_once(' ')?;
    count.parse::<i64>().ok().map(|_| (piece, overwrites))
}
