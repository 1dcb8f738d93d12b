//! Which ranks keep the others of a collective waiting.

use crate::layout::Rank;

/// Returns those of the `missing` members of a collective that keep the others waiting: the ranks
/// that do not wait in another collective themselves, or all if every one of them waits.
pub(super) fn late_ranks(missing: Vec<Rank>, waits: impl Fn(Rank) -> bool) -> Vec<Rank> {
    let late: Vec<Rank> = missing.iter().copied().filter(|rank| !waits(*rank)).collect();
    if late.is_empty() { missing } else { late }
}
