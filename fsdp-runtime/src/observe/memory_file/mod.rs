//! Files of memory over time: SVG, HTML and JSON.
//!
//! Imports point one way: json, of_forecast <- form <- file.

mod file;
mod form;
mod json;
mod of_forecast;

pub use self::file::MemoryFile;
pub use self::form::MemoryFileError;
