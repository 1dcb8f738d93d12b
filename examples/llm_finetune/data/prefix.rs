//! Check that one rendering of a template continues another.

/// Characters of an excerpt before and after the difference.
const EXCERPT: usize = 40;

/// Error: a rendering of the first messages is not a prefix of the rendering of more messages, so
/// that the assistant's part of the text is unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "message {message}: the template renders the first messages differently once {longer} (some \
     templates drop the reasoning of earlier turns). The texts differ at byte {offset}: \
     {before:?} became {after:?}"
)]
pub struct PrefixError {
    /// Number of the assistant's message, from 1.
    pub message: usize,
    /// Description of the longer rendering.
    pub longer: &'static str,
    /// First byte that differs.
    pub offset: usize,
    /// Text of the shorter rendering around the difference.
    pub before: String,
    /// Text of the longer rendering around the difference.
    pub after: String,
}

/// Checks that `text` begins with `prefix`. `message` and `longer` describe the two in the error.
///
/// # Errors
///
/// If it does not.
pub fn check_prefix(
    prefix: &str,
    text: &str,
    message: usize,
    longer: &'static str,
) -> Result<(), PrefixError> {
    if text.starts_with(prefix) {
        return Ok(());
    }
    let equal = prefix.chars().zip(text.chars()).take_while(|(a, b)| a == b);
    let offset = equal.map(|(a, _)| a.len_utf8()).sum();
    let (before, after) = (excerpt(prefix, offset), excerpt(text, offset));
    Err(PrefixError { message, longer, offset, before, after })
}

/// Returns the text around byte `offset`, which is at a border of characters.
fn excerpt(text: &str, offset: usize) -> String {
    let (head, tail) = text.split_at(offset);
    let skipped = head.chars().count().saturating_sub(EXCERPT);
    head.chars().skip(skipped).chain(tail.chars().take(EXCERPT)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_shown_with_its_offset() {
        assert_eq!(check_prefix("añb", "añbc", 1, ""), Ok(()));
        let error = check_prefix("añbx", "añcd", 3, "a turn follows").unwrap_err();
        assert_eq!((error.offset, error.message), (3, 3));
        assert_eq!((error.before.as_str(), error.after.as_str()), ("añbx", "añcd"));
        let message = error.to_string();
        assert!(message.contains("at byte 3: \"añbx\" became \"añcd\""), "{message}");
    }

    #[test]
    fn a_text_that_ends_early_differs_at_its_end() {
        let long = "x".repeat(100);
        let error = check_prefix(&long, &long[..90], 1, "").unwrap_err();
        assert_eq!((error.offset, error.before.len(), error.after.len()), (90, 50, 40));
    }
}
