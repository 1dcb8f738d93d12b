//! The part of a matrix that a tensor parallel rank has.

use std::ops::Range;

use burn::tensor::Slice;
use fsdp_kernels::RoundedPart;

/// The part of a parameter that a tensor parallel rank has: one of equal parts along a dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TensorSplit {
    /// Dimension that is split.
    pub(crate) dim: usize,
    /// Number of this rank's part.
    pub(crate) part: usize,
    /// Number of parts.
    pub(crate) parts: usize,
    /// Whether the layer returns the outputs of all ranks.
    pub(crate) gathers: bool,
}

impl TensorSplit {
    /// Returns the shape of a part of a parameter, whose size along the dimension the number of parts
    /// divides.
    pub(crate) fn local_shape(&self, whole: &[usize]) -> Vec<usize> {
        let mut shape = whole.to_vec();
        shape[self.dim] /= self.parts;
        shape
    }

    /// Returns the shape of the whole parameter.
    pub(crate) fn whole_shape(&self, local: &[usize]) -> Vec<usize> {
        let mut shape = local.to_vec();
        shape[self.dim] *= self.parts;
        shape
    }

    /// Returns the indices along the dimension that this rank has, of a part of shape `local`.
    pub(crate) fn indices(&self, local: &[usize]) -> Range<usize> {
        let size = local[self.dim];
        self.part * size..(self.part + 1) * size
    }

    /// Returns the indices along each dimension of the whole parameter that this rank has, of a part of shape
    /// `local`.
    pub(crate) fn slices(&self, local: &[usize]) -> Vec<Slice> {
        let indices = |(dim, &size)| match dim == self.dim {
            true => self.indices(local),
            false => 0..size,
        };
        local.iter().enumerate().map(indices).map(Slice::from).collect()
    }

    /// Returns which part of each of the whole parameter's rows a part of shape `local` has.
    pub(crate) fn of_rows(&self, local: &[usize]) -> RoundedPart {
        let len = local[self.dim..].iter().product();
        RoundedPart { len, parts: self.parts, part: self.part }
    }

    /// Returns the elements of the flattened whole parameter that the elements `range` of the flattened part
    /// are, as ranges in order.
    pub(crate) fn runs(&self, local: &[usize], range: Range<usize>) -> Vec<Range<usize>> {
        // Elements of a part that lie together in the whole parameter.
        let run: usize = local[self.dim..].iter().product();
        let mut runs = Vec::new();
        let mut at = range.start;
        while at < range.end && run > 0 {
            let (block, within) = (at / run, at % run);
            let count = (run - within).min(range.end - at);
            let start = (block * self.parts + self.part) * run + within;
            runs.push(start..start + count);
            at += count;
        }
        runs
    }
}

/// Returns the parts that hold the elements `range` of a flattened tensor of shape `whole`, which is split in
/// `parts` along `dim`: the number of each part and the elements of the flattened part, in order.
pub(crate) fn parts_of(
    whole: &[usize],
    (dim, parts): (usize, usize),
    range: Range<usize>,
) -> Vec<(usize, Range<usize>)> {
    // Elements of one part that lie together.
    let run = whole[dim..].iter().product::<usize>() / parts;
    let mut found = Vec::new();
    let mut at = range.start;
    while at < range.end && run > 0 {
        let (number, within) = (at / run, at % run);
        let (block, part) = (number / parts, number % parts);
        let count = (run - within).min(range.end - at);
        let start = block * run + within;
        found.push((part, start..start + count));
        at += count;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Element `[i, j]` of a whole matrix of 4 x 6 is `6 i + j`.
    #[test]
    fn elements_of_a_part_are_found_in_the_whole() {
        let columns = TensorSplit { dim: 1, part: 1, parts: 2, gathers: false };
        assert_eq!(columns.local_shape(&[4, 6]), [4, 3]);
        assert_eq!(columns.whole_shape(&[4, 3]), [4, 6]);
        assert_eq!(columns.indices(&[4, 3]), 3..6);
        assert_eq!(columns.runs(&[4, 3], 2..8), [5..6, 9..12, 15..17]);
        let found = parts_of(&[4, 6], (1, 2), 4..11);
        assert_eq!(found, [(1, 1..3), (0, 3..6), (1, 3..5)]);
        assert_eq!(parts_of(&[4, 6], (0, 2), 10..14), [(0, 10..12), (1, 0..2)]);
        let rows = TensorSplit { dim: 0, part: 1, parts: 2, gathers: false };
        assert_eq!(rows.local_shape(&[4, 6]), [2, 6]);
        assert_eq!(rows.runs(&[2, 6], 2..8), vec![14..20; 1]);
        assert!(rows.runs(&[2, 6], 3..3).is_empty());
    }
}
