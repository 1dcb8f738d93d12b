//! Splitting a process group by colors, as `MPI_Comm_split` does.

use std::sync::Arc;

/// Returns the positions of the members that gave `color`, in order, and which of these is `own`,
/// the position of the calling rank.
///
/// # Panics
///
/// Panics if the calling rank gave another color.
pub(super) fn members_of_color(
    colors: &[Arc<usize>],
    color: usize,
    own: usize,
) -> (Vec<usize>, usize) {
    let gave_color = |&index: &usize| *colors[index] == color;
    let positions: Vec<usize> = (0..colors.len()).filter(gave_color).collect();
    let index = positions.iter().position(|&index| index == own).expect("own color");
    (positions, index)
}
