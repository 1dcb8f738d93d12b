//! Errors and notes about a configuration file. All problems of a file are reported at once.

use std::fmt;
use std::io;
use std::path::PathBuf;

use super::nearest::list;
use super::place::Place;

/// Error of a configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system, or text that is not UTF-8.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("{}: cannot be written: {source}", path.display())]
    Write {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The file is not YAML, or has YAML that no configuration file needs, such as aliases.
    #[error("{}: line {line}, column {column}: not valid YAML: {message}", path.display())]
    Syntax {
        /// Path of the file.
        path: PathBuf,
        /// Line, counted from 1.
        line: usize,
        /// Column, counted from 1.
        column: usize,
        /// Message of the parser.
        message: String,
    },
    /// The file has keys or values that cannot be used.
    #[error("{}", problem_lines(path, problems))]
    Invalid {
        /// Path of the file; empty if there is none, and the command line has the problems.
        path: PathBuf,
        /// All problems, in the order of their lines. Those of the command line come last.
        problems: Vec<Problem>,
    },
}

fn problem_lines(path: &std::path::Path, problems: &[Problem]) -> String {
    let file =
        if path.as_os_str().is_empty() { String::new() } else { format!("{}: ", path.display()) };
    match problems {
        // The file is not to blame for a problem of the command line.
        [problem] if problem.place == Some(Place::CommandLine) => problem.to_string(),
        [problem] => format!("{file}{problem}"),
        problems => problems.iter().fold(
            format!("{file}{} problems", problems.len()),
            |mut text, problem| {
                text.push_str(&format!("\n  {problem}"));
                text
            },
        ),
    }
}

/// A problem with a configuration, and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Problem {
    /// Place of the key; `None` if the problem is a missing key.
    pub place: Option<Place>,
    /// Kind of the problem, with the key and the value.
    pub kind: ProblemKind,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            Some(place) => write!(f, "{place}: {}", self.kind),
            None => self.kind.fmt(f),
        }
    }
}

/// A problem with a key or its value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProblemKind {
    /// A key that Accelerate does not have.
    #[error("unknown key `{key}`{}", hint(*nearest, &[]))]
    UnknownKey {
        /// Key in the file.
        key: String,
        /// Known key that was probably meant.
        nearest: Option<&'static str>,
    },
    /// A key in the wrong part of the file.
    #[error("`{key}` belongs {place}")]
    Misplaced {
        /// Key in the file.
        key: String,
        /// Part of the file to which the key belongs, such as "at the top level".
        place: &'static str,
    },
    /// A value that the key does not take.
    #[error("unknown value `{value}` for `{key}`{}", hint(*nearest, valid))]
    UnknownValue {
        /// Key in the file.
        key: String,
        /// Value in the file.
        value: String,
        /// Known value that was probably meant.
        nearest: Option<&'static str>,
        /// Values that the key takes.
        valid: Vec<&'static str>,
    },
    /// A value of the wrong type or out of range.
    #[error("`{key}` is `{value}`; expected {expected}")]
    WrongValue {
        /// Key in the file.
        key: String,
        /// Value in the file.
        value: String,
        /// Description of valid values.
        expected: String,
    },
    /// A key that is in the file twice.
    #[error("`{key}` is already {}", first.phrase())]
    DuplicateKey {
        /// Key in the file.
        key: String,
        /// Place of the first of the two.
        first: Place,
    },
    /// Two keys that contradict each other.
    #[error("`{key}` is `{value}`, but `{other}` {} is `{other_value}`; {fix}", other_place.phrase())]
    Contradiction {
        /// Key in the file.
        key: &'static str,
        /// Value of the key `key`.
        value: String,
        /// Key that contradicts `key`.
        other: &'static str,
        /// Place of the key `other`.
        other_place: Place,
        /// Value of the key `other`.
        other_value: String,
        /// Advice on how to resolve the contradiction.
        fix: &'static str,
    },
    /// An option of Accelerate that the runtime does not have.
    #[error("`{key}: {value}` is not supported; {instead}")]
    Unsupported {
        /// Key in the file.
        key: &'static str,
        /// Value in the file.
        value: String,
        /// Advice on what to write instead.
        instead: &'static str,
    },
    /// A required key that is missing.
    #[error("`{key}` is missing; {instead}")]
    Missing {
        /// Required key that the file does not have.
        key: &'static str,
        /// Advice on what to write.
        instead: &'static str,
    },
    /// A name in `fsdp_transformer_layer_cls_to_wrap` that is not a unit of the program's model.
    #[error(
        "`fsdp_transformer_layer_cls_to_wrap` names `{name}`, which is no unit of `{model}`{}",
        hint(*nearest, units)
    )]
    UnknownUnit {
        /// Name in the file.
        name: String,
        /// Type name of the model.
        model: &'static str,
        /// Unit that was probably meant.
        nearest: Option<&'static str>,
        /// Type names of the model's units.
        units: Vec<&'static str>,
    },
}

/// Returns the end of a message: the value that was probably meant, or the list of valid values.
fn hint(nearest: Option<&'static str>, valid: &[&'static str]) -> String {
    match nearest {
        Some(nearest) => format!("; did you mean `{nearest}`?"),
        None if valid.is_empty() => String::new(),
        None => format!("; expected {}", list(valid.iter().copied())),
    }
}

/// A key of Accelerate that has no effect here.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Note {
    /// Place of the key.
    pub place: Place,
    /// Key in the file, or of the flag.
    pub key: String,
    /// Value in the file.
    pub value: String,
    /// Reason why the key has no effect, and what to use instead, if there is something.
    pub reason: String,
    /// Whether the value is the one that Accelerate writes when the option is off. Such a note can
    /// be ignored.
    pub off: bool,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, key, value, reason, .. } = self;
        write!(f, "{place}: `{key}: {value}` has no effect here: {reason}")
    }
}
