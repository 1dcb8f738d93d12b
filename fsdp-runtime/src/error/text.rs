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

/// Returns the names in backticks, separated by commas, or `none`.
pub(super) fn names(names: &[String]) -> String {
    let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}
