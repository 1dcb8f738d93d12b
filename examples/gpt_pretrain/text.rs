//! Text to train on: the embedded book or the user's files. Its last tenth is held out.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow};
use miniz_oxide::inflate::decompress_to_vec;

/// Embedded book. `data/README.md` has its origin and licence.
const BOOK: &[u8] = include_bytes!("data/moby_dick.txt.gz");
/// Bytes of gzip's header without a file name (RFC 1952).
const GZIP_HEADER: usize = 10;
/// Bytes of gzip's checksum and length (RFC 1952).
const GZIP_TRAILER: usize = 8;
/// The last `1 / HELD_OUT` of the text is held out.
const HELD_OUT: usize = 10;

/// Text in two parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    /// Name, to be shown to the user.
    pub name: String,
    /// Part to train on.
    pub train: String,
    /// Part to evaluate on: the end of the text.
    pub held_out: String,
}

impl Text {
    /// Returns the embedded book, Moby-Dick.
    ///
    /// # Errors
    ///
    /// If the embedded file is damaged.
    pub fn embedded() -> Result<Self> {
        let deflated = &BOOK[GZIP_HEADER..BOOK.len() - GZIP_TRAILER];
        let text = decompress_to_vec(deflated)
            .map_err(|error| anyhow!("the embedded book is damaged: {error}"))?;
        let text = String::from_utf8(text).context("the embedded book is damaged")?;
        Ok(Self::split("Moby-Dick".into(), text))
    }

    /// Reads files and joins them in order.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, or is not UTF-8.
    pub fn read(files: &[PathBuf]) -> Result<Self> {
        let mut text = String::new();
        for file in files {
            let more = fs::read_to_string(file)
                .with_context(|| format!("cannot read the text {}", file.display()))?;
            text.push_str(&more);
        }
        let names: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
        Ok(Self::split(names.join(", "), text))
    }

    /// Splits at the first line start in the last part, or within a line if there is no line start.
    fn split(name: String, mut text: String) -> Self {
        let at = text.ceil_char_boundary(text.len() - text.len() / HELD_OUT);
        let line = text[at..].find('\n').map_or(at, |end| at + end + 1);
        let held_out = text.split_off(if line < text.len() { line } else { at });
        Self { name, train: text, held_out }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_book_is_whole_and_its_end_held_out() {
        let text = Text::embedded().unwrap();
        assert!(text.train.starts_with("CHAPTER 1. Loomings.\n\nCall me Ishmael."));
        assert!(text.held_out.contains("ESCAPED ALONE TO TELL THEE"), "the epilogue");
        let part = text.held_out.len() as f64 / (text.train.len() + text.held_out.len()) as f64;
        assert!((part - 0.1).abs() < 0.01, "{part}");
        assert!(text.train.ends_with('\n'));
    }

    #[test]
    fn files_are_joined_in_order() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = directory.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let files = [file("a", &"one — line\n".repeat(50)), file("b", &"x".repeat(200))];
        let text = Text::read(&files).unwrap();
        assert_eq!(
            text.train.clone() + &text.held_out,
            fs::read_to_string(&files[0]).unwrap() + &"x".repeat(200)
        );
        assert!(!text.held_out.is_empty());
        fs::write(&files[1], [0xff, 0xfe]).unwrap();
        assert!(format!("{:#}", Text::read(&files).unwrap_err()).contains("cannot read"));
    }
}
