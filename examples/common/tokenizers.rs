//! Files of tokenizers, and errors of the tokenizers crate.

use std::path::Path;

use anyhow::{Context, Result, anyhow};

/// Converts an error of the tokenizers crate. It is a boxed trait object, which `anyhow` does not
/// convert by itself.
pub fn tokenizer_error(error: ::tokenizers::Error) -> anyhow::Error {
    anyhow!("tokenizer: {error}")
}

/// Reads files of a directory, those of `names` that it has. Returns names and contents.
///
/// # Errors
///
/// If a file cannot be read.
pub fn read_files(directory: &Path, names: &[&str]) -> Result<Vec<(String, Vec<u8>)>> {
    let existing = names.iter().filter(|name| directory.join(name).is_file());
    let read = existing.map(|name| {
        let path = directory.join(name);
        let contents =
            std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok((name.to_string(), contents))
    });
    read.collect()
}
