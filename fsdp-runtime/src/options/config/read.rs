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
use super::error::{ConfigError, Note, Problem};
use super::keys::Section;
use super::overrides::Overrides;
use super::types::{Config, Source};
use super::yaml::{self, KeyValue, Value};

/// Reads the text of a file, whose values `overrides` replace. Errors name the file as `path`.
pub(super) fn read(
    text: &str,
    path: &Path,
    overrides: &Overrides,
) -> Result<(Config, Vec<Note>), ConfigError> {
    let syntax = |error: yaml::SyntaxError| ConfigError::Syntax {
        path: path.into(),
        line: error.line,
        column: error.column,
        message: error.message,
    };
    let root = yaml::parse(text).map_err(syntax)?;
    let mut reader = Reader::default();
    reader.config.source = Source { path: path.into(), ..Source::default() };
    let entries = match root.map(|root| root.value) {
        None => Vec::new(),
        Some(Value::Map(entries)) => entries,
        Some(_) => {
            let message = "expected lines of `key: value`".into();
            return Err(syntax(yaml::SyntaxError { line: 1, column: 1, message }));
        }
    };
    let entries = overrides.apply(entries, &mut reader.notes);
    reader.section(Section::Top, &entries);
    reader.check_agreement();
    let Reader { config, mut notes, mut problems, .. } = reader;
    if problems.is_empty() {
        notes.sort_by_key(|note| note.place);
        return Ok((config, notes));
    }
    problems.sort_by_key(|problem| problem.place);
    Err(ConfigError::Invalid { path: path.into(), problems })
}

/// Returns the problems of the keys under `fsdp_config`, each on its own.
pub(super) fn check_fsdp_section(entries: &[KeyValue]) -> Vec<Problem> {
    let mut reader = Reader::default();
    reader.section(Section::Fsdp, entries);
    reader.read_renamed();
    reader.problems.sort_by_key(|problem| problem.place);
    reader.problems
}
