//! The elements of a mask that belong to a part of a tensor.

use std::ops::Range;

/// The places of a part of a dimension in the whole one: one block of neighbours, or two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    whole: usize,
    /// First place of each block.
    starts: [usize; 2],
    lens: [usize; 2],
}

impl Places {
    /// Returns the places of a whole dimension.
    pub const fn all(len: usize) -> Self {
        Self { whole: len, starts: [0, len], lens: [len, 0] }
    }

    /// Returns the places of two blocks, in ascending order, of a dimension of `whole` elements. The second block
    /// may be empty.
    ///
    /// # Panics
    ///
    /// If the blocks overlap or exceed the dimension.
    pub fn blocks(whole: usize, [first, second]: [Range<usize>; 2]) -> Self {
        let are_in_order = first.end <= second.start || second.is_empty();
        assert!(are_in_order && first.end.max(second.end) <= whole, "blocks of a dimension");
        let starts = [first.start, second.start];
        Self { whole, starts, lens: [first.len(), second.len()] }
    }

    /// Returns the number of elements of the whole dimension.
    pub const fn whole(&self) -> usize {
        self.whole
    }

    /// Returns the number of elements of the part.
    pub const fn len(&self) -> usize {
        self.lens[0] + self.lens[1]
    }

    /// Returns whether the part has no elements.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether the part is the whole dimension.
    pub const fn is_all(&self) -> bool {
        self.len() == self.whole
    }

    /// Returns the place of an element of the part in the whole dimension.
    pub const fn at(&self, local: usize) -> usize {
        if local < self.lens[0] {
            self.starts[0] + local
        } else {
            self.starts[1] + local - self.lens[0]
        }
    }

    /// Returns the elements of the part that are in the range, as runs of neighbours: the elements, and the place of
    /// the first.
    pub fn runs(&self, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> + use<> {
        let places = *self;
        let split = self.lens[0].clamp(range.start, range.end);
        let runs = [range.start..split, split..range.end];
        runs.into_iter().filter(|run| !run.is_empty()).map(move |run| {
            let place = places.at(run.start);
            (run, place)
        })
    }

    /// Returns the first place, and the number of elements, of each block.
    #[cfg(feature = "cube")]
    pub(crate) fn block_numbers(&self) -> [[usize; 2]; 2] {
        [[self.starts[0], self.lens[0]], [self.starts[1], self.lens[1]]]
    }
}

/// The part of a mask that belongs to a tensor with a part of each of up to four dimensions. An element has the
/// random bits that it has in the mask of the whole tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskPart {
    dims: [Places; 4],
}

/// Neighbouring elements of a part that are neighbours in the whole mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Index of the first element in the part.
    pub(crate) local: usize,
    /// Number of the first element in the whole mask.
    pub(crate) number: usize,
    pub(crate) len: usize,
}

impl MaskPart {
    /// Returns the part that has these places of each dimension.
    pub const fn new(dims: [Places; 4]) -> Self {
        Self { dims }
    }

    /// Returns the places of each dimension.
    #[cfg(feature = "cube")]
    pub(crate) fn dims(&self) -> &[Places; 4] {
        &self.dims
    }

    /// Returns the number of elements of the part.
    pub fn numel(&self) -> usize {
        self.dims.iter().map(Places::len).product()
    }

    /// Returns the number of elements of the whole mask.
    pub fn whole_numel(&self) -> usize {
        self.dims.iter().map(Places::whole).product()
    }

    /// Returns the runs of the part, in ascending order.
    pub(crate) fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        // Trailing dimensions that are whole belong to the runs of the one before.
        let inner = self.dims.iter().rposition(|dim| !dim.is_all()).unwrap_or(0);
        let width: usize = self.dims[inner + 1..].iter().map(Places::whole).product();
        let (outer, dim) = (&self.dims[..inner], self.dims[inner]);
        let rows: usize = outer.iter().map(Places::len).product();
        (0..rows).flat_map(move |row| {
            let (mut left, mut number, mut factor) = (row, 0, 1);
            for places in outer.iter().rev() {
                number += places.at(left % places.len()) * factor;
                left /= places.len();
                factor *= places.whole();
            }
            dim.runs(0..dim.len()).map(move |(run, place)| Run {
                local: (row * dim.len() + run.start) * width,
                number: (number * dim.whole() + place) * width,
                len: run.len() * width,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MaskSource;

    /// Returns the numbers of a part's elements, by the definition.
    fn numbers(part: &MaskPart) -> Vec<usize> {
        let [a, b, c, d] = part.dims;
        let mut numbers = Vec::new();
        for i in 0..a.len() {
            for j in 0..b.len() {
                for k in 0..c.len() {
                    for l in 0..d.len() {
                        let outer = a.at(i) * b.whole() + b.at(j);
                        numbers.push((outer * c.whole() + c.at(k)) * d.whole() + d.at(l));
                    }
                }
            }
        }
        numbers
    }

    fn parts() -> Vec<MaskPart> {
        let all = Places::all;
        let two = Places::blocks(12, [2..4, 8..10]);
        let one = Places::blocks(10, [5..10, 10..10]);
        vec![
            MaskPart::new([all(2), all(3), all(4), all(5)]),
            MaskPart::new([all(2), all(1), two, all(7)]),
            MaskPart::new([all(2), all(3), two, one]),
            MaskPart::new([all(3), one, all(4), two]),
            MaskPart::new([one, all(3), all(4), all(2)]),
            MaskPart::new([all(1), all(1), all(300), Places::blocks(200, [100..200, 0..0])]),
        ]
    }

    #[test]
    fn runs_have_the_numbers_of_the_definition() {
        for part in parts() {
            let mut found = vec![usize::MAX; part.numel()];
            for run in part.runs() {
                for at in 0..run.len {
                    found[run.local + at] = run.number + at;
                }
            }
            assert_eq!(found, numbers(&part), "{part:?}");
        }
    }

    #[test]
    fn a_part_has_the_elements_of_the_whole_mask() {
        let source = MaskSource { key: [1, 2], counter: [3, 4], prob: 0.4 };
        for part in parts() {
            let whole = source.mask(part.whole_numel());
            let expected: Vec<f32> = numbers(&part).into_iter().map(|at| whole[at]).collect();
            assert_eq!(source.mask_of(&part), expected, "{part:?}");
        }
    }

    #[test]
    fn runs_of_a_range_end_at_the_blocks() {
        let two = Places::blocks(12, [2..4, 8..11]);
        assert_eq!(two.runs(0..5).collect::<Vec<_>>(), [(0..2, 2), (2..5, 8)]);
        assert_eq!(two.runs(1..2).collect::<Vec<_>>(), [(1..2, 3)]);
        assert_eq!(two.runs(3..5).collect::<Vec<_>>(), [(3..5, 9)]);
        assert_eq!(two.runs(3..3).count(), 0);
    }
}
