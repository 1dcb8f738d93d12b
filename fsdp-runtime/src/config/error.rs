//! What can be wrong with a configuration file. All problems of a file are reported at once.

use std::fmt;
use std::io;
use std::path::PathBuf;

use super::nearest::list;

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("{}: cannot be written: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The file is no YAML.
    #[error("{}: line {line}, column {column}: not valid YAML: {message}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The column, counted from 1.
        column: usize,
        /// What the parser says.
        message: String,
    },
    /// Keys or values that cannot be used.
    #[error("{}", lines(path, problems))]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Everything that is wrong with it, in the order of its lines.
        problems: Vec<Problem>,
    },
}

fn lines(path: &std::path::Path, problems: &[Problem]) -> String {
    let path = path.display();
    match problems {
        [problem] => format!("{path}: {problem}"),
        problems => problems.iter().fold(
            format!("{path}: {} problems", problems.len()),
            |mut text, problem| {
                text.push_str(&format!("\n  {problem}"));
                text
            },
        ),
    }
}

/// One thing that is wrong with a configuration, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The line, counted from 1; `None` for what no line says.
    pub line: Option<usize>,
    /// What is wrong.
    pub kind: ProblemKind,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "line {line}: {}", self.kind),
            None => self.kind.fmt(f),
        }
    }
}

/// What is wrong with a key or its value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProblemKind {
    /// A key that is none of Accelerate's.
    #[error("unknown key `{key}`{}", hint(*nearest, &[]))]
    UnknownKey {
        /// The key.
        key: String,
        /// The key that was probably meant.
        nearest: Option<&'static str>,
    },
    /// A key that stands in the wrong part of the file.
    #[error("`{key}` belongs {place}")]
    Misplaced {
        /// The key.
        key: String,
        /// Where it belongs.
        place: &'static str,
    },
    /// A value that is none of those the key takes.
    #[error("unknown value `{value}` for `{key}`{}", hint(*nearest, valid))]
    UnknownValue {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// The value that was probably meant.
        nearest: Option<&'static str>,
        /// The values that the key takes.
        valid: Vec<&'static str>,
    },
    /// A value of the wrong kind, or out of its range.
    #[error("`{key}` is `{value}`; expected {expected}")]
    WrongValue {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What it can be.
        expected: String,
    },
    /// A key that stands in the file twice.
    #[error("`{key}` stands on line {first} already")]
    DuplicateKey {
        /// The key.
        key: String,
        /// The line of the first.
        first: usize,
    },
    /// Two keys that contradict each other.
    #[error("`{key}` is `{value}`, but `{other}` on line {other_line} is `{other_value}`; {fix}")]
    Contradiction {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// The other key.
        other: &'static str,
        /// The line of the other.
        other_line: usize,
        /// The value of the other.
        other_value: String,
        /// What to do.
        fix: &'static str,
    },
    /// An option of Accelerate's that this build cannot fulfil.
    #[error("`{key}: {value}` is not supported; {instead}")]
    Unsupported {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What to write instead.
        instead: &'static str,
    },
    /// A key without which the file cannot be used for this.
    #[error("`{key}` is missing; {instead}")]
    Missing {
        /// The key.
        key: &'static str,
        /// What to write.
        instead: &'static str,
    },
    /// A name in `fsdp_transformer_layer_cls_to_wrap` that is no unit of the program's model.
    #[error(
        "`fsdp_transformer_layer_cls_to_wrap` names `{name}`, which is no unit of `{model}`{}",
        hint(*nearest, units)
    )]
    UnknownUnit {
        /// The name.
        name: String,
        /// The model's type.
        model: &'static str,
        /// The unit that was probably meant.
        nearest: Option<&'static str>,
        /// The model's units.
        units: Vec<&'static str>,
    },
}

fn hint(nearest: Option<&'static str>, valid: &[&'static str]) -> String {
    match nearest {
        Some(nearest) => format!("; did you mean `{nearest}`?"),
        None if valid.is_empty() => String::new(),
        None => format!("; expected {}", list(valid.iter().copied())),
    }
}

/// A key of Accelerate's that has no effect here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The line, counted from 1.
    pub line: usize,
    /// The key.
    pub key: String,
    /// Its value.
    pub value: String,
    /// Why it has no effect, and what has instead.
    pub reason: String,
    /// The value is the one Accelerate writes when the option is off, so nothing is lost.
    pub off: bool,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { line, key, value, reason, .. } = self;
        write!(f, "line {line}: `{key}: {value}` has no effect here: {reason}")
    }
}
