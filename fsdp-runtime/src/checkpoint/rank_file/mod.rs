//! One rank's safetensors file: flat pieces of tensors, written in one pass and read in parts.
//!
//! Imports: header ← reader, writer.

mod header;
mod reader;
#[cfg(test)]
mod tests;
mod writer;

pub(super) use self::reader::RankFileReader;
pub(super) use self::writer::RankFileWriter;
