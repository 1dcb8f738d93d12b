//! Lists in error texts.

use crate::layout::Rank;

/// Returns the numbers of ranks, separated by commas.
pub(super) fn rank_list(ranks: &[Rank]) -> String {
    ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join(", ")
}

/// Returns each item on an indented line of its own, with a line break before it.
pub(super) fn lines(items: &[String]) -> String {
    items.iter().map(|item| format!("\n  {item}")).collect()
}

/// Returns names with their numbers of bytes, separated by commas.
pub(super) fn sizes(sizes: &[(String, usize)]) -> String {
    sizes.iter().map(|(name, bytes)| format!("{name} {bytes}")).collect::<Vec<_>>().join(", ")
}

/// Returns an error, and then each cause of the one before.
pub(crate) fn with_sources<'a>(
    error: &'a (dyn std::error::Error + 'static),
) -> impl Iterator<Item = &'a (dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error), |error| error.source())
}

/// Returns the text of an error and of its causes, except of those whose text is in it already.
pub(crate) fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    for reason in with_sources(error).skip(1).map(ToString::to_string) {
        if !text.contains(&reason) {
            text = format!("{text}: {reason}");
        }
    }
    text
}

/// Returns the names in backticks, separated by commas, or `none`.
pub(super) fn names(names: &[String]) -> String {
    let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

/// Returns the cause of a norm that is infinite or NaN: the first such gradient, and a rank that has it.
pub(super) fn nonfinite(first: Option<&(String, Rank)>) -> String {
    match first {
        Some((path, rank)) => {
            format!("the gradient of `{path}` has an infinite or NaN element on rank {rank}")
        }
        None => "all elements are finite, and their norm overflows".into(),
    }
}

/// Returns what losses are: sums, or means.
pub(super) fn loss_of(sum: bool) -> &'static str {
    if sum { "a sum with a weight" } else { "a mean" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Context {
        text: &'static str,
        #[source]
        source: std::io::Error,
    }

    #[test]
    fn causes_follow_unless_the_text_has_them() {
        let error = |text| Context { text, source: std::io::Error::other("the disk is full") };
        assert_eq!(with_causes(&error("cannot save")), "cannot save: the disk is full");
        assert_eq!(with_causes(&error("no: the disk is full")), "no: the disk is full");
    }
}
