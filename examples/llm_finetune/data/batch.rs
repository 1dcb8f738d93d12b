//! Batches of a rank in host memory.

use anyhow::{Context, Result, bail};

use super::dataset::Dataset;
use super::packing::Rows;

/// Label of a place that has no target, as in PyTorch.
pub const IGNORED: i32 = -100;
/// Segment of padding, which no conversation has.
pub const PADDING: i32 = -1;

/// Length of the rows of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowLength {
    /// This many tokens.
    Fixed(usize),
    /// Tokens of the longest row of the batch, rounded up to a multiple of this number.
    Longest(usize),
}

/// Rows of tokens with their targets. Each list has shape `[rows, length]`, row by row.
///
/// A place of padding has the padding id, position 0, segment -1 and label -100. Padding is known
/// by its place, never by its id, which the end of a turn may have, too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostBatch {
    /// Number of rows, at least 1.
    pub rows: usize,
    /// Tokens of a row, padding included.
    pub length: usize,
    /// Ids of the tokens.
    pub ids: Vec<i32>,
    /// Position of each token in its conversation, from 0.
    pub positions: Vec<i32>,
    /// Number of the token's conversation in its row, from 0. A token attends to its own segment.
    pub segments: Vec<i32>,
    /// Target of each token: the id of the next one if it is in the same conversation and counts,
    /// else -100. Labels are shifted already.
    pub labels: Vec<i32>,
    /// Number of targets.
    pub counted: usize,
    /// Number of tokens without padding.
    pub tokens: usize,
}

impl HostBatch {
    /// Creates the batch of the rows in `share`. An empty share becomes one row of padding, whose
    /// weight in the loss is 0.
    ///
    /// # Errors
    ///
    /// If a row has more tokens than a fixed length, or an id is 2^31 or larger.
    ///
    /// # Panics
    ///
    /// If a number in `share` is not below the number of rows.
    pub fn new(
        dataset: &Dataset,
        rows: &Rows,
        share: &[usize],
        pad: u32,
        length: RowLength,
    ) -> Result<Self> {
        let tokens_of = |row: &usize| -> usize {
            rows.get(*row).map(|conversation| dataset.length(conversation)).sum()
        };
        let longest = share.iter().map(tokens_of).max().unwrap_or(0);
        let length = match length {
            RowLength::Fixed(length) if longest > length => {
                bail!("a row has {longest} tokens, more than the {length} of the batch")
            }
            RowLength::Fixed(length) => length,
            RowLength::Longest(multiple) => longest.next_multiple_of(multiple).max(multiple),
        };
        let mut batch = Self::padding(share.len().max(1), length, id(pad)?);
        for (at, row) in share.iter().enumerate() {
            let mut start = at * length;
            for (segment, conversation) in rows.get(*row).enumerate() {
                start = batch.write(dataset, conversation, start, segment)?;
            }
        }
        Ok(batch)
    }

    fn padding(rows: usize, length: usize, pad: i32) -> Self {
        let filled = |value: i32| vec![value; rows * length];
        Self {
            rows,
            length,
            ids: filled(pad),
            positions: filled(0),
            segments: filled(PADDING),
            labels: filled(IGNORED),
            counted: 0,
            tokens: 0,
        }
    }

    /// Writes a conversation from place `start` on. Returns the place after it.
    fn write(
        &mut self,
        dataset: &Dataset,
        conversation: usize,
        start: usize,
        segment: usize,
    ) -> Result<usize> {
        let conversation = dataset.get(conversation);
        for (token, value) in conversation.ids.iter().enumerate() {
            let at = start + token;
            self.ids[at] = id(*value)?;
            self.positions[at] = token as i32;
            self.segments[at] = segment as i32;
            // The first token of a conversation is not predicted by the last one of another.
            if token > 0 && conversation.is_counted(token) {
                self.labels[at - 1] = self.ids[at];
                self.counted += 1;
            }
        }
        self.tokens += conversation.ids.len();
        Ok(start + conversation.ids.len())
    }
}

fn id(id: u32) -> Result<i32> {
    i32::try_from(id).with_context(|| format!("the id {id} is 2^31 or larger"))
}

#[cfg(test)]
mod tests {
    use super::super::packing::Packing;
    use super::*;
    use crate::data::fixture::{counted, numbered};

    #[test]
    fn labels_are_shifted_and_end_at_borders() {
        // The tokens of conversation 0 are 0, 1, 2, and those of conversation 1 are 100, 101.
        let dataset = numbered(&[3, 2]);
        let rows = Rows::new(&dataset, Packing::InOrder, 8).unwrap();
        let batch = HostBatch::new(&dataset, &rows, &[0], 7, RowLength::Fixed(7)).unwrap();
        assert_eq!((batch.rows, batch.length, batch.counted, batch.tokens), (1, 7, 3, 5));
        assert_eq!(batch.ids, [0, 1, 2, 100, 101, 7, 7]);
        assert_eq!(batch.labels, [1, 2, -100, 101, -100, -100, -100]);
        assert_eq!(batch.positions, [0, 1, 2, 0, 1, 0, 0]);
        assert_eq!(batch.segments, [0, 0, 0, 1, 1, -1, -1]);
        // The border is kept even if the first token of a conversation is marked.
        let (first, second): (&[u32], &[u32]) = (&[1, 2], &[3, 4]);
        let marked = counted(&[(first, &[true; 2]), (second, &[true; 2])]);
        let both = Rows::new(&marked, Packing::InOrder, 4).unwrap();
        let batch = HostBatch::new(&marked, &both, &[0], 7, RowLength::Fixed(4)).unwrap();
        assert_eq!((batch.labels, batch.counted), (vec![2, -100, 4, -100], 2));
        let short = HostBatch::new(&dataset, &rows, &[0], 7, RowLength::Fixed(4));
        assert!(short.unwrap_err().to_string().contains("5 tokens, more than the 4"));
    }

    #[test]
    fn only_counted_tokens_are_targets() {
        let ids: &[u32] = &[5, 6, 7, 8];
        let dataset = counted(&[(ids, &[true, false, true, true])]);
        let rows = Rows::new(&dataset, Packing::None, 8).unwrap();
        let batch = HostBatch::new(&dataset, &rows, &[0], 0, RowLength::Longest(8)).unwrap();
        assert_eq!(batch.labels, [-100, 7, 8, -100, -100, -100, -100, -100]);
        assert_eq!(batch.counted, 2);
    }

    #[test]
    fn padding_is_known_by_its_place() {
        // The padding id is that of the end of the turn, and the turn ends twice.
        let ids: &[u32] = &[5, 2, 2];
        let dataset = counted(&[(ids, &[true; 3])]);
        let rows = Rows::new(&dataset, Packing::None, 8).unwrap();
        let batch = HostBatch::new(&dataset, &rows, &[0], 2, RowLength::Fixed(5)).unwrap();
        assert_eq!(batch.ids, [5, 2, 2, 2, 2]);
        assert_eq!(batch.labels, [2, 2, -100, -100, -100]);
        assert_eq!(batch.segments, [0, 0, 0, -1, -1]);
    }

    #[test]
    fn rows_are_as_long_as_the_longest_and_a_rank_without_rows_has_padding() {
        let dataset = numbered(&[3, 9, 17]);
        let rows = Rows::new(&dataset, Packing::None, 32).unwrap();
        let batch = HostBatch::new(&dataset, &rows, &[1, 0], 9, RowLength::Longest(8)).unwrap();
        assert_eq!((batch.rows, batch.length, batch.tokens), (2, 16, 12));
        assert_eq!(batch.ids[16..20], [0, 1, 2, 9]);
        let empty = HostBatch::new(&dataset, &rows, &[], 9, RowLength::Longest(8)).unwrap();
        assert_eq!((empty.rows, empty.length, empty.counted, empty.tokens), (1, 8, 0, 0));
        assert!(empty.labels.iter().all(|label| *label == IGNORED));
        assert!(empty.segments.iter().all(|segment| *segment == PADDING));
    }
}
