//! A row of a data file, before and after it is parsed.

use anyhow::Result;
use minijinja::Value;

use super::reason::Reason;
use super::row::Row;

/// A row as it is in a file.
#[derive(Clone, Debug)]
pub struct Record {
    /// Line of the file, or row of a Parquet file, from 1.
    pub line: u64,
    /// Bytes of the file that the row takes, for the progress bar.
    pub bytes: u64,
    /// The row.
    pub content: Content,
}

/// Content of a row.
#[derive(Clone, Debug)]
pub enum Content {
    /// A line of JSON that is not parsed.
    Json(Vec<u8>),
    /// A row of a Parquet file.
    Value(Value),
}

/// Iterator over the rows of a file. It ends at the first error.
pub type Records = Box<dyn Iterator<Item = Result<Record>>>;

impl Record {
    /// Converts the row.
    ///
    /// # Errors
    ///
    /// If it is no JSON or no valid row.
    pub fn parse(&self) -> Result<Row, Reason> {
        match &self.content {
            Content::Value(value) => Row::parse(value),
            Content::Json(line) => {
                let value: Value = serde_json::from_slice(line).map_err(|error| {
                    let text = error.to_string();
                    // A row is one line, and its number is given beside the reason.
                    Reason::Json(text.replace("at line 1 column", "at column"))
                })?;
                Row::parse(&value)
            }
        }
    }
}
