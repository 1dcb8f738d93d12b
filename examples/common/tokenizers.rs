//! Errors of the tokenizers crate.

use anyhow::anyhow;

/// Converts an error of the tokenizers crate. It is a boxed trait object, which `anyhow` does not
/// convert by itself.
pub fn tokenizer_error(error: ::tokenizers::Error) -> anyhow::Error {
    anyhow!("tokenizer: {error}")
}
