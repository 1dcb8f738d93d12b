//! Reasons for which a row of the data is not used.

use super::prefix::PrefixError;

/// Reason for which a row is rejected. The place of the row is kept beside it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Reason {
    /// A line that is no JSON.
    #[error("not valid JSON: {0}")]
    Json(String),
    /// A row without a known set of columns.
    #[error(
        "the row has neither `messages`, nor `prompt` and `completion`, nor `text`; it has {found}"
    )]
    Columns {
        /// Names of the columns that the row has.
        found: String,
    },
    /// A value of another type than expected.
    #[error("{what} is {found}, where {expected} is expected")]
    Type {
        /// Name of the value.
        what: String,
        /// Type that was found.
        found: &'static str,
        /// Valid types.
        expected: &'static str,
    },
    /// A message of an unknown role.
    #[error("message {message}: unknown role {role:?}; known roles: {known}")]
    Role {
        /// Number of the message, from 1.
        message: usize,
        /// Role that was found.
        role: String,
        /// Known roles.
        known: &'static str,
    },
    /// A text or a list of messages that is empty.
    #[error("{0} is empty")]
    Empty(&'static str),
    /// A conversation in which the assistant says nothing.
    #[error("the conversation has no assistant turn")]
    NoAssistant,
    /// An error of the chat template, such as one from `raise_exception`.
    #[error("chat template: {0}")]
    Template(String),
    /// A template whose rendering of the first messages changes with the messages after them.
    #[error(transparent)]
    Prefix(#[from] PrefixError),
    /// An error of the tokenizer.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A row with more tokens than a sequence may have.
    #[error("{tokens} tokens are more than the maximum of {max}")]
    TooLong {
        /// Number of tokens.
        tokens: usize,
        /// Largest number of tokens.
        max: usize,
    },
    /// A row in which no token counts for the loss.
    #[error("no token counts for the loss")]
    NothingCounted,
}

impl Reason {
    /// Returns the name under which rows with such a reason are counted.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Json(_) => "not valid JSON",
            Self::Columns { .. } => "unknown columns",
            Self::Type { .. } => "a value of a wrong type",
            Self::Role { .. } => "unknown role",
            Self::Empty(_) => "empty",
            Self::NoAssistant => "no assistant turn",
            Self::Template(_) => "refused by the chat template",
            Self::Prefix(_) => "the template changes earlier turns",
            Self::Tokenizer(_) => "refused by the tokenizer",
            Self::TooLong { .. } => "too long",
            Self::NothingCounted => "no token counts for the loss",
        }
    }
}
