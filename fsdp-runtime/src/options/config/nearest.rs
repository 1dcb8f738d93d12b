//! Suggestions for error messages: the known word nearest to a misspelt one, and lists of words.

/// Returns the known word with the smallest edit distance to `word`, ignoring case. `None` if that
/// distance exceeds a third of the length of `word`, or 1 for a word of fewer than 6 characters.
pub(super) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let lower = word.to_ascii_lowercase();
    let distance = |known: &str| strsim::damerau_levenshtein(&lower, &known.to_ascii_lowercase());
    let (distance, known) =
        known.into_iter().map(|known| (distance(known), known)).min_by_key(|(near, _)| *near)?;
    (distance <= (word.chars().count() / 3).max(1)).then_some(known)
}

/// Joins words to a text such as `` `A`, `B` or `C` ``.
pub(super) fn list<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    let words: Vec<String> = words.into_iter().map(|word| format!("`{word}`")).collect();
    match words.as_slice() {
        [] => String::new(),
        [one] => one.clone(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_word_is_recognised_and_another_word_is_not() {
        let known = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"];
        assert_eq!(nearest("FULL_SHRAD", known), Some("FULL_SHARD"));
        assert_eq!(nearest("full-shard", known), Some("FULL_SHARD"));
        assert_eq!(nearest("zero3", known), None);
        assert_eq!(nearest("x", []), None);
    }

    #[test]
    fn lists_read_as_text() {
        assert_eq!(list(["a"]), "`a`");
        assert_eq!(list(["a", "b", "c"]), "`a`, `b` or `c`");
    }
}
