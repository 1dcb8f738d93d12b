//! Text files that are read in chunks of whole lines.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;

use anyhow::{Context, Result};

/// The last `1 / HELD_OUT` of a text is held out.
const HELD_OUT: u64 = 10;

/// Returns the byte from which a text of `size` bytes is held out. The line that it is in is not.
pub fn held_out_from(size: u64) -> u64 {
    size - size / HELD_OUT
}

/// Reader of files, joined in order.
pub struct ChunkReader {
    files: Box<dyn BufRead>,
    /// Names of the files, for errors.
    names: String,
    /// Number of bytes read.
    at: u64,
    /// Whether a chunk may not end in white space, which GPT-2's tokenizer joins over lines.
    joins_space: bool,
    /// White space from the end of the last chunk.
    carried: String,
}

impl ChunkReader {
    /// Opens files. `joins_space` moves white space at the end of a chunk to the next one.
    ///
    /// # Errors
    ///
    /// If a file cannot be opened.
    pub fn open(files: &[PathBuf], joins_space: bool) -> Result<Self> {
        let mut chain: Box<dyn BufRead> = Box::new(std::io::empty());
        for path in files {
            let file = File::open(path);
            let file = file.with_context(|| format!("cannot read the text {}", path.display()))?;
            chain = Box::new(chain.chain(BufReader::new(file)));
        }
        let names: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
        let (names, carried) = (names.join(", "), String::new());
        Ok(Self { files: chain, names, at: 0, joins_space, carried })
    }

    /// Returns up to `count` chunks; none at the end.
    ///
    /// # Errors
    ///
    /// Those of [`chunk`](Self::chunk).
    pub fn chunks(&mut self, count: usize, size: u64, end: Option<u64>) -> Result<Vec<String>> {
        let mut chunks = Vec::new();
        while chunks.len() < count
            && let Some(chunk) = self.chunk(size, end)?
        {
            chunks.push(chunk);
        }
        Ok(chunks)
    }

    /// Returns the next `size` bytes and the rest of the line, of which at most `size` bytes. At the
    /// byte `end` of all files, or the end of the line that it is in, there is no further chunk.
    ///
    /// # Errors
    ///
    /// If the files cannot be read or are not UTF-8.
    pub fn chunk(&mut self, size: u64, end: Option<u64>) -> Result<Option<String>> {
        let left = end.map_or(size, |end| end.saturating_sub(self.at).min(size));
        let mut bytes = Vec::new();
        self.read(&mut bytes, left, size).with_context(|| format!("cannot read {}", self.names))?;
        let start = self.at;
        self.at += bytes.len() as u64;
        let last = bytes.is_empty();
        let text = String::from_utf8(bytes)
            .with_context(|| format!("{} is not UTF-8, in the bytes from {start}", self.names))?;
        let mut text = std::mem::take(&mut self.carried) + &text;
        if self.joins_space && !last {
            self.carried = text.split_off(text.trim_end().len());
            if text.is_empty() {
                return self.chunk(size, end);
            }
        }
        Ok((!text.is_empty()).then_some(text))
    }

    fn read(&mut self, bytes: &mut Vec<u8>, size: u64, longest: u64) -> std::io::Result<()> {
        if size == 0 {
            return Ok(());
        }
        self.files.by_ref().take(size).read_to_end(bytes)?;
        self.files.by_ref().take(longest).read_until(b'\n', bytes)?;
        // A line that is longer is cut between two characters.
        while std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none()) {
            if self.files.by_ref().take(1).read_to_end(bytes)? == 0 {
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks(text: &str, size: u64, joins_space: bool) -> Vec<String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let mut reader = ChunkReader::open(&[file.path().into()], joins_space).unwrap();
        reader.chunks(1000, size, None).unwrap()
    }

    #[test]
    fn chunks_are_whole_lines() {
        assert_eq!(chunks("one\ntwo\n\nthree", 5, false), ["one\ntwo\n", "\nthree"]);
        assert_eq!(chunks("one\ntwo\n\nthree", 5, true), ["one\ntwo", "\n\nthree"]);
        assert_eq!(chunks("one\n \n ", 2, true), ["one", "\n \n "]);
        assert_eq!(chunks("", 5, true), [""; 0]);
        let long = "é".repeat(50);
        let cut = chunks(&long, 7, false);
        assert!(cut.len() > 2 && cut.concat() == long, "{cut:?}");
    }

    #[test]
    fn the_end_of_a_part_is_that_of_a_line() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "one\ntwo\nthree\n").unwrap();
        let mut reader = ChunkReader::open(&[file.path().into()], false).unwrap();
        assert_eq!(reader.chunks(9, 3, Some(6)).unwrap(), ["one\n", "two\n"]);
        assert_eq!(reader.chunks(9, 100, None).unwrap(), ["three\n"]);
        std::fs::write(file.path(), [b'a', 0xff]).unwrap();
        let mut reader = ChunkReader::open(&[file.path().into()], false).unwrap();
        let error = format!("{:#}", reader.chunk(9, None).unwrap_err());
        assert!(error.contains("is not UTF-8"), "{error}");
    }
}
