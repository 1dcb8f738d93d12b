//! The place of a key: a line of the file, or the command line.

use std::fmt;

/// The place of a key: a line of the file, or the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Place {
    /// Line of the file, counted from 1.
    Line(usize),
    /// The command line, whose flags override the file.
    CommandLine,
}

impl Place {
    /// Returns the place as a part of a sentence: "on line 3", or "on the command line".
    pub(super) fn phrase(self) -> String {
        match self {
            Self::Line(line) => format!("on line {line}"),
            Self::CommandLine => "on the command line".into(),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(f, "line {line}"),
            Self::CommandLine => f.write_str("command line"),
        }
    }
}
