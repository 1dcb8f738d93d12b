//! What can go wrong when weights are read or written.

/// Weights that cannot be loaded, or do not fit the model.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A file that cannot be read.
    #[error("cannot read {file}: {reason}")]
    Io {
        /// The file.
        file: String,
        /// The system's reason.
        reason: String,
    },
    /// A file that is not what its name says.
    #[error("{file} is not a valid {format}: {reason}")]
    Format {
        /// The file.
        file: String,
        /// What it should be.
        format: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// An index that does not fit the files it names: all differences.
    #[error("{file} does not fit the files it names:{}", lines(problems))]
    Index {
        /// The index.
        file: String,
        /// What is wrong, a file or a tensor each.
        problems: Vec<String>,
    },
    /// Tensors that are missing, unexpected or misshapen: all of them.
    #[error("{file} does not fit the model:{}", differences(missing, unexpected, misshapen))]
    Mismatch {
        /// The file or folder.
        file: String,
        /// Keys the model needs and the file lacks.
        missing: Vec<String>,
        /// Keys in the file that the model has no place for.
        unexpected: Vec<String>,
        /// Keys with another shape or dtype, and how they differ.
        misshapen: Vec<String>,
    },
}

/// Weights that cannot be written.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// A file or folder that cannot be written.
    #[error("cannot write {file}: {reason}")]
    Io {
        /// The file.
        file: String,
        /// The system's reason.
        reason: String,
    },
    /// An additional file that does not lie in the folder, or is the weights'.
    #[error("`{name}` cannot be the name of an additional file: {reason}")]
    FileName {
        /// The name.
        name: String,
        /// Why not.
        reason: &'static str,
    },
    /// Two parameters with one key.
    #[error(
        "`{first}` and `{second}` would both be saved as `{key}`; give one of them another \
         `#[fsdp(key = \"..\")]`"
    )]
    DuplicateKey {
        /// The key.
        key: String,
        /// The parameter found first.
        first: String,
        /// The one found next.
        second: String,
    },
}

fn lines(problems: &[String]) -> String {
    problems.iter().map(|problem| format!("\n  {problem}")).collect()
}

fn differences(missing: &[String], unexpected: &[String], misshapen: &[String]) -> String {
    let mut text = String::new();
    for (title, names) in
        [("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen)]
    {
        for name in names {
            text.push_str(&format!("\n  {title}: {name}"));
        }
    }
    text
}
