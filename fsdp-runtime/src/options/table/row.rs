//! The types of the table of options: a row, and the keys of Accelerate's file that set an option.

/// One option: its names, its default and its range, as the documentation shows them.
#[derive(Clone, Copy, Debug)]
pub struct OptionRow {
    /// Name of the field of `FsdpOptions`, and in messages.
    pub name: &'static str,
    /// Name of the builder method of `FsdpOptions`.
    pub builder: &'static str,
    /// One line of help, without a full stop.
    pub help: &'static str,
    /// Default, in Markdown; rustdoc links name items of this room.
    pub default: &'static str,
    /// Values that the option takes, in Markdown.
    pub range: &'static str,
    /// Keys of Accelerate's file that set the option, or the reason why there are none.
    pub keys: Keys,
}

impl OptionRow {
    /// Returns the default in Markdown without links: `` `Pre` `` for `` [`Pre`](BackwardPrefetch::Pre) ``.
    pub fn default_without_link(&self) -> &'static str {
        let label = self.default.strip_prefix('[').and_then(|link| link.split_once("]("));
        label.map_or(self.default, |(label, _)| label)
    }

    /// Returns whether the option is a setting of single units: by type (`_for`) or by module path
    /// (`_at`).
    pub fn is_of_units(&self) -> bool {
        self.name.ends_with("_for") || self.name.ends_with("_at")
    }

    /// Returns the keys of Accelerate's file that set the option.
    pub fn file_keys(&self) -> &'static [FileKey] {
        match self.keys {
            Keys::InFile(keys) => keys,
            Keys::NotInFile(_) => &[],
        }
    }
}

/// The keys of Accelerate's file that set an option.
#[derive(Clone, Copy, Debug)]
pub enum Keys {
    /// The keys, the one that a new file has first.
    InFile(&'static [FileKey]),
    /// No key, and the reason.
    NotInFile(&'static str),
}

/// A key of Accelerate's file, the flag of `fsdp launch` and the question of `fsdp config`.
#[derive(Clone, Copy, Debug)]
pub struct FileKey {
    /// Name of the key. The flag has this name too.
    pub name: &'static str,
    /// Name of the value in the help of the flag, such as `BOOL`; `None` for a flag without a value,
    /// which sets `true`.
    pub value: Option<&'static str>,
    /// Help of the flag, without a full stop.
    pub help: &'static str,
    /// Newer key of the same meaning; a value of one of them replaces the other.
    pub same_as: Option<&'static str>,
    /// Whether `same_as` is only another name, for the same values.
    pub renamed: bool,
    /// Question of `fsdp config`; `None` for a key that is not asked for.
    pub question: Option<Question>,
}

/// A question of `fsdp config`.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    /// The question, as a person reads it.
    pub text: &'static str,
    /// Default answer: a value of the key.
    pub default: &'static str,
    /// Values to choose from, each with an explanation; empty for a Boolean, a number or a text.
    pub choices: &'static [(&'static str, &'static str)],
}

/// Returns a key whose flag has a value.
pub(super) const fn key(name: &'static str, value: &'static str, help: &'static str) -> FileKey {
    FileKey { name, value: Some(value), help, same_as: None, renamed: false, question: None }
}

/// Returns a key whose flag has no value.
pub(super) const fn switch(name: &'static str, help: &'static str) -> FileKey {
    FileKey { value: None, ..key(name, "", help) }
}

impl FileKey {
    /// Marks the key as another way to say what the key `newer` says.
    pub(super) const fn same_as(self, newer: &'static str) -> Self {
        Self { same_as: Some(newer), ..self }
    }

    /// Marks the key as the older name of the key `newer`.
    pub(super) const fn older_name_of(self, newer: &'static str) -> Self {
        Self { renamed: true, ..self.same_as(newer) }
    }

    /// Adds a question of `fsdp config`.
    pub(super) const fn asked(
        self,
        text: &'static str,
        default: &'static str,
        choices: &'static [(&'static str, &'static str)],
    ) -> Self {
        Self { question: Some(Question { text, default, choices }), ..self }
    }
}
