//! Data files of each type.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::record::Records;
use super::{json_lines, parquet_rows};

/// Where rows come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// A file of JSON lines (`.jsonl`, `.json` or `.ndjson`) or a Parquet file (`.parquet`).
    File(PathBuf),
    /// JSON lines in the program.
    Embedded {
        /// Name for error messages.
        name: &'static str,
        /// The lines.
        contents: &'static [u8],
    },
}

impl Source {
    /// Returns the name for error messages.
    pub fn name(&self) -> String {
        match self {
            Self::File(path) => path.display().to_string(),
            Self::Embedded { name, .. } => (*name).into(),
        }
    }

    /// Returns the size in bytes.
    ///
    /// # Errors
    ///
    /// If the file's metadata cannot be read.
    pub fn bytes(&self) -> Result<u64> {
        match self {
            Self::File(path) => {
                let read = || format!("cannot read {}", path.display());
                Ok(std::fs::metadata(path).with_context(read)?.len())
            }
            Self::Embedded { contents, .. } => Ok(contents.len() as u64),
        }
    }

    /// Opens the contents as they are.
    ///
    /// # Errors
    ///
    /// If the file cannot be opened.
    pub fn open(&self) -> Result<Box<dyn Read>> {
        match self {
            Self::File(path) => Ok(Box::new(open_file(path)?)),
            Self::Embedded { contents, .. } => Ok(Box::new(*contents)),
        }
    }

    /// Returns the rows.
    ///
    /// # Errors
    ///
    /// If the file cannot be opened, is of an unknown type, or is damaged. The iterator's errors
    /// are those of reading on.
    pub fn records(&self) -> Result<Records> {
        let path = match self {
            Self::Embedded { contents, .. } => {
                return json_lines::records(*contents, self.name());
            }
            Self::File(path) => path,
        };
        match path.extension().and_then(|ending| ending.to_str()) {
            Some("jsonl" | "json" | "ndjson") => json_lines::records(open_file(path)?, self.name()),
            Some("parquet") => parquet_rows::records(open_file(path)?, path),
            _ => bail!(
                "{}: unknown type of data; use a file ending with .jsonl, .json, .ndjson or \
                 .parquet",
                path.display()
            ),
        }
    }
}

fn open_file(path: &Path) -> Result<File> {
    File::open(path).with_context(|| format!("cannot open {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.csv");
        std::fs::write(&path, "x").unwrap();
        let error = Source::File(path).records().err().unwrap().to_string();
        assert!(error.contains("a.csv: unknown type of data"), "{error}");
        let missing = Source::File(folder.path().join("b.jsonl"));
        assert!(format!("{:#}", missing.records().err().unwrap()).contains("b.jsonl"));
    }
}
