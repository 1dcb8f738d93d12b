//! A string built in a constant, for the message of a failed check.

use crate::module::{Child, Kind, Node};

/// Capacity of a [`Text`], in bytes.
const CAPACITY: usize = 1024;

/// A string of at most [`CAPACITY`] bytes. Text beyond that is dropped.
#[derive(Clone, Copy)]
pub struct Text {
    bytes: [u8; CAPACITY],
    len: usize,
}

impl Text {
    /// Creates a text with the content `start`.
    pub const fn new(start: &str) -> Self {
        Self { bytes: [0; CAPACITY], len: 0 }.then(start)
    }

    /// Returns the text with `more` appended.
    pub const fn then(mut self, more: &str) -> Self {
        self.push(more);
        self
    }

    /// Returns the text with `name` appended in backquotes.
    pub const fn code(self, name: &str) -> Self {
        self.then("`").then(name).then("`")
    }

    /// Appends `more`.
    pub const fn push(&mut self, more: &str) {
        let more = more.as_bytes();
        let mut i = 0;
        while i < more.len() && self.len < CAPACITY {
            self.bytes[self.len] = more[i];
            self.len += 1;
            i += 1;
        }
    }

    /// Appends a segment of a dotted path. An empty segment adds nothing.
    pub const fn push_segment(&mut self, segment: &str) {
        if self.len > 0 && !segment.is_empty() {
            self.push(".");
        }
        self.push(segment);
    }

    /// Shortens the text to its first `len` bytes.
    pub const fn truncate(&mut self, len: usize) {
        self.len = len;
    }

    /// Returns the length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns the text, without an incomplete character at the end.
    pub const fn as_str(&self) -> &str {
        let bytes = self.bytes.split_at(self.len).0;
        match core::str::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => match core::str::from_utf8(bytes.split_at(error.valid_up_to()).0) {
                Ok(text) => text,
                Err(_) => "",
            },
        }
    }

    /// Fails the constant, with the text as the compiler's message.
    #[track_caller]
    pub const fn fail(&self) -> ! {
        panic!("{}", self.as_str())
    }
}

/// Returns whether two strings are equal.
pub const fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len() != b.len() {
        return false;
    }
    let mut i = 0;
    while i < a.len() {
        if a[i] != b[i] {
            return false;
        }
        i += 1;
    }
    true
}

/// Returns the segment that a child adds to a module path. `{}` stands for the index of a list's
/// element.
pub const fn path_segment(parent: &Node, child: &Child) -> &'static str {
    match parent.kind {
        Kind::List => "{}",
        _ => child.name,
    }
}
