//! Lines on standard output and standard error.
//!
//! Write errors are ignored: `fsdp env | head -1` closes the pipe early, and `println!` would
//! panic.

use std::fmt;
use std::io::Write as _;

/// Writes a line to standard output.
pub(crate) fn out(line: impl fmt::Display) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Writes a line to standard error, after the prefix `fsdp: `.
pub(crate) fn err(line: impl fmt::Display) {
    let _ = writeln!(std::io::stderr(), "fsdp: {line}");
}
