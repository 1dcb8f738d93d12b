//! Conversion of YAML to a [`Config`].
//!
//! Every key is read, noted as without effect, or reported as a problem. Reading continues after a
//! problem, so that all problems of a file are reported at once.
//!
//! Order of the files, each of which uses only those before it:
//!
//! 1. `reader.rs`: what has been read so far, and values of one type.
//! 2. `keys.rs`: keys whose values need rules of their own.
//! 3. `sections.rs`: the function that reads each key.
//! 4. `agree.rs`: rules that hold across keys.
//! 5. This file.

mod agree;
mod keys;
mod reader;
mod sections;

use std::path::Path;

use self::reader::Reader;
use super::error::{ConfigError, Note};
use super::keys::Section;
use super::types::{Config, Source};
use super::yaml::{self, Value};

/// Reads the text of a file. Errors name the file as `path`.
pub(super) fn read(text: &str, path: &Path) -> Result<(Config, Vec<Note>), ConfigError> {
    let syntax = |error: yaml::SyntaxError| ConfigError::Syntax {
        path: path.into(),
        line: error.line,
        column: error.column,
        message: error.message,
    };
    let root = yaml::parse(text).map_err(syntax)?;
    let mut reader = Reader::default();
    reader.config.source = Source { path: path.into(), ..Source::default() };
    match root.map(|root| (root.line, root.value)) {
        None => {}
        Some((_, Value::Map(entries))) => {
            reader.section(Section::Top, &entries);
            reader.check_agreement();
        }
        Some((line, _)) => {
            return Err(syntax(yaml::SyntaxError {
                line,
                column: 1,
                message: "expected lines of `key: value`".into(),
            }));
        }
    }
    let Reader { config, mut notes, mut problems, .. } = reader;
    if problems.is_empty() {
        notes.sort_by_key(|note| note.line);
        return Ok((config, notes));
    }
    problems.sort_by_key(|problem| problem.line);
    Err(ConfigError::Invalid { path: path.into(), problems })
}
