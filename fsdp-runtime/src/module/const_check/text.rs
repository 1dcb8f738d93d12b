//! A string built in a constant, for the message of a failed check.

/// What does not fit is left out.
const CAPACITY: usize = 1024;

/// A string of limited length.
#[derive(Clone, Copy)]
pub struct Text {
    bytes: [u8; CAPACITY],
    len: usize,
}

impl Text {
    /// A text that begins with `start`.
    pub const fn new(start: &str) -> Self {
        Self { bytes: [0; CAPACITY], len: 0 }.then(start)
    }

    /// The text with `more` after it.
    pub const fn then(mut self, more: &str) -> Self {
        self.push(more);
        self
    }

    /// The text with `` `name` `` after it.
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

    /// Appends a segment of a dotted path; an empty one adds nothing.
    pub const fn push_segment(&mut self, segment: &str) {
        if self.len > 0 && !segment.is_empty() {
            self.push(".");
        }
        self.push(segment);
    }

    /// Takes back what was appended since the text was `len` bytes long.
    pub const fn truncate(&mut self, len: usize) {
        self.len = len;
    }

    /// The length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// The text, without a letter that was cut in two.
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

    /// Fails the constant, with this text as the compiler's message.
    #[track_caller]
    pub const fn fail(&self) -> ! {
        panic!("{}", self.as_str())
    }
}

/// Whether two strings are equal.
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
