//! Segments of packed rows, in host memory.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Segments of packed rows: runs of neighbouring positions with one number, for each row of a batch.
/// Copies share memory.
#[derive(Clone, Debug)]
pub struct Segments {
    /// Number of positions of a row.
    length: usize,
    /// First position of each position's segment, and the one after its last, row after row; or the keys that
    /// each query sees.
    runs: Arc<[[u32; 2]]>,
}

/// A number that has two segments in one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitSegment {
    /// Row of the batch.
    pub row: usize,
    /// Number of the segments.
    pub number: i64,
    /// Position after the first segment's last.
    pub end: usize,
    /// First position of the second segment.
    pub again: usize,
}

impl fmt::Display for SplitSegment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { row, number, end, again } = self;
        write!(
            f,
            "row {row} has segment {number} before position {end} and again at position {again}: the positions of \
             a segment must be neighbours"
        )
    }
}

impl std::error::Error for SplitSegment {}

impl Segments {
    /// Returns the segments of rows of `length` positions, given the number of the segment of each
    /// position, row after row.
    ///
    /// # Errors
    ///
    /// If a number returns in a row after another number.
    pub fn new(numbers: &[i64], length: usize) -> Result<Self, SplitSegment> {
        let mut runs = Vec::with_capacity(numbers.len());
        for (row, numbers) in numbers.chunks(length.max(1)).enumerate() {
            let mut ends: HashMap<i64, usize> = HashMap::new();
            let mut first = 0;
            for run in numbers.chunk_by(|one, next| one == next) {
                let (number, end) = (run[0], first + run.len());
                if let Some(&end) = ends.get(&number) {
                    return Err(SplitSegment { row, number, end, again: first });
                }
                ends.insert(number, end);
                runs.extend(std::iter::repeat_n([first as u32, end as u32], run.len()));
                first = end;
            }
        }
        Ok(Self { length, runs: runs.into() })
    }

    /// Returns ranges of keys in place of segments: the first key that each query sees and the one after the
    /// last, row after row of the batch, for rows of `queries` queries. There may be more keys than queries.
    /// Neither the first nor the last key decreases from one query of a row to the next.
    pub fn of_ranges(ranges: Vec<[u32; 2]>, queries: usize) -> Self {
        Self { length: queries, runs: ranges.into() }
    }

    /// Returns the segments with other numbers of positions or keys: `map` of each first one and of each one after
    /// the last. It does not decrease.
    pub fn renumbered(&self, map: impl Fn(usize) -> usize) -> Self {
        let run = |run: &[u32; 2]| run.map(|position| map(position as usize) as u32);
        Self { length: self.length, runs: self.runs.iter().map(run).collect() }
    }

    /// Returns whether some position has a segment, or sees a key.
    pub fn has_keys(&self) -> bool {
        self.runs.iter().any(|[first, end]| first < end)
    }

    /// Returns the shape of the numbers: `[batch, length]`.
    pub fn dims(&self) -> [usize; 2] {
        [self.runs.len() / self.length.max(1), self.length]
    }

    /// Returns the positions of the segment to which a position of a row belongs.
    pub fn around(&self, row: usize, position: usize) -> Range<usize> {
        let [first, end] = self.runs[row * self.length + position];
        first as usize..end as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_has_the_run_of_its_number() {
        let segments = Segments::new(&[7, 7, -1, 3, 3, 7, 7, 7, 7, 7], 5).unwrap();
        assert_eq!(segments.dims(), [2, 5]);
        let runs: Vec<_> = (0..5).map(|at| segments.around(0, at)).collect();
        assert_eq!(runs, [0..2, 0..2, 2..3, 3..5, 3..5]);
        assert!((0..5).all(|at| segments.around(1, at) == (0..5)));
        assert_eq!(Segments::new(&[], 0).unwrap().dims(), [0, 0]);
    }

    #[test]
    fn a_number_that_returns_is_an_error() {
        let error = Segments::new(&[1, 1, 1, 2, 2, 3, 1, 2], 4).unwrap_err();
        assert_eq!(error, SplitSegment { row: 1, number: 2, end: 1, again: 3 });
        let text = error.to_string();
        assert!(text.contains("row 1 has segment 2 before position 1"), "{text}");
        // Rows have numbers of their own.
        assert!(Segments::new(&[1, 2, 2, 1], 2).is_ok());
    }
}
