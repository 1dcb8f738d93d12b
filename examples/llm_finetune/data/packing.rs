//! Places conversations into the rows of batches.

use anyhow::{Result, bail, ensure};

use super::dataset::Dataset;

/// How conversations are placed into rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// One conversation in a row.
    None,
    /// Several conversations in a row: each, from the longest on, goes into the first row that has
    /// room for it (first-fit decreasing).
    FirstFit,
    /// Several conversations in a row, in the order of the data: a conversation that does not fit
    /// into the present row begins the next one (next fit).
    InOrder,
}

/// Rows of conversations. Each conversation is in one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Conversations of all rows, one row after the other.
    conversations: Vec<u32>,
    /// End of each row in `conversations`.
    ends: Vec<usize>,
}

impl Rows {
    /// Places the conversations of a data set into rows of at most `length` tokens.
    ///
    /// # Errors
    ///
    /// If a conversation is longer than `length`.
    pub fn new(dataset: &Dataset, packing: Packing, length: usize) -> Result<Self> {
        let lengths: Vec<usize> = (0..dataset.len()).map(|index| dataset.length(index)).collect();
        Self::of_lengths(&lengths, packing, length)
    }

    /// Places conversations of these lengths into rows of at most `length` tokens.
    ///
    /// # Errors
    ///
    /// If a conversation is longer than `length`.
    pub fn of_lengths(lengths: &[usize], packing: Packing, length: usize) -> Result<Self> {
        if let Some(index) = lengths.iter().position(|tokens| *tokens > length) {
            let tokens = lengths[index];
            bail!("conversation {index} has {tokens} tokens, more than the {length} of a row");
        }
        ensure!(u32::try_from(lengths.len()).is_ok(), "more than 2^32 conversations");
        let rows = match packing {
            Packing::None => (0..lengths.len()).collect(),
            Packing::FirstFit => first_fit(lengths, length),
            Packing::InOrder => next_fit(lengths, length),
        };
        Ok(Self::of_assignment(&rows))
    }

    /// Collects the conversations of each row. `rows` has the row of each conversation. Within a
    /// row they are in the order of the data.
    fn of_assignment(rows: &[usize]) -> Self {
        let mut ends = vec![0; rows.iter().max().map_or(0, |last| last + 1)];
        for row in rows {
            ends[*row] += 1;
        }
        let mut sum = 0;
        for end in &mut ends {
            // The start of the row for now. It grows to the end below.
            sum += std::mem::replace(end, sum);
        }
        let mut conversations = vec![0; rows.len()];
        for (conversation, row) in rows.iter().enumerate() {
            conversations[ends[*row]] = conversation as u32;
            ends[*row] += 1;
        }
        Self { conversations, ends }
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns the conversations of a row.
    ///
    /// # Panics
    ///
    /// If `row` is not below [`len`](Self::len).
    pub fn get(&self, row: usize) -> impl ExactSizeIterator<Item = usize> + '_ {
        let start = if row == 0 { 0 } else { self.ends[row - 1] };
        self.conversations[start..self.ends[row]].iter().map(|index| *index as usize)
    }
}

/// Returns the row of each conversation for packing in order.
fn next_fit(lengths: &[usize], length: usize) -> Vec<usize> {
    let (mut row, mut used) = (0, 0);
    let place = |tokens: &usize| {
        if used + tokens > length {
            (row, used) = (row + 1, 0);
        }
        used += tokens;
        row
    };
    lengths.iter().map(place).collect()
}

/// Returns the row of each conversation for first-fit decreasing. Conversations of equal length are
/// placed in the order of the data.
///
/// A tree over all possible rows has the largest room below each of its nodes, so that the first
/// row with enough room is found in as many steps as the tree is deep.
fn first_fit(lengths: &[usize], length: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|index| std::cmp::Reverse(lengths[*index]));
    let leaves = lengths.len().next_power_of_two();
    let mut room = vec![length; 2 * leaves];
    let mut rows = vec![0; lengths.len()];
    for index in order {
        let mut node = 1;
        while node < leaves {
            node *= 2;
            if room[node] < lengths[index] {
                node += 1;
            }
        }
        rows[index] = node - leaves;
        room[node] -= lengths[index];
        while node > 1 {
            node /= 2;
            room[node] = room[2 * node].max(room[2 * node + 1]);
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::shuffle::shuffled;

    fn rows(lengths: &[usize], packing: Packing, length: usize) -> Vec<Vec<usize>> {
        let rows = Rows::of_lengths(lengths, packing, length).unwrap();
        (0..rows.len()).map(|row| rows.get(row).collect()).collect()
    }

    #[test]
    fn small_cases_are_placed_as_described() {
        let lengths = [5, 7, 3, 5, 2, 8];
        assert_eq!(rows(&lengths, Packing::None, 10), [[0], [1], [2], [3], [4], [5]]);
        assert_eq!(
            rows(&lengths, Packing::InOrder, 10),
            [vec![0], vec![1, 2], vec![3, 4], vec![5]]
        );
        // 8, 7, 5, 5, 3, 2: rows of 8 + 2, 7 + 3, 5 + 5.
        assert_eq!(rows(&lengths, Packing::FirstFit, 10), [[4, 5], [1, 2], [0, 3]]);
        assert!(rows(&[], Packing::FirstFit, 10).is_empty());
        let error = Rows::of_lengths(&[3, 11], Packing::None, 10).unwrap_err().to_string();
        assert!(error.contains("conversation 1 has 11 tokens"), "{error}");
    }

    #[test]
    fn each_conversation_is_in_one_row_that_it_fits_into() {
        for (count, length) in [(1, 64), (7, 64), (64, 64), (1000, 64), (1000, 511)] {
            let lengths: Vec<_> = shuffled(count, 3, 0)
                .into_iter()
                .map(|number| number % length.min(count) + 1)
                .collect();
            for packing in [Packing::None, Packing::FirstFit, Packing::InOrder] {
                let rows = rows(&lengths, packing, length);
                let mut all = rows.concat();
                all.sort_unstable();
                assert_eq!(all, (0..count).collect::<Vec<_>>());
                let used = rows.iter().map(|row| row.iter().map(|index| lengths[*index]).sum());
                assert!(used.clone().all(|used: usize| used > 0 && used <= length));
            }
            let packed = rows(&lengths, Packing::FirstFit, length);
            assert!(packed.len() <= rows(&lengths, Packing::InOrder, length).len());
            assert_eq!(packed, rows(&lengths, Packing::FirstFit, length));
        }
    }

    #[test]
    fn a_tree_places_as_a_search_does() {
        let lengths: Vec<_> =
            shuffled(300, 1, 0).into_iter().map(|number| number % 40 + 1).collect();
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        order.sort_by_key(|index| std::cmp::Reverse(lengths[*index]));
        let mut expected: Vec<Vec<usize>> = Vec::new();
        for index in order {
            let fits = |row: &Vec<usize>| {
                row.iter().map(|i| lengths[*i]).sum::<usize>() + lengths[index] <= 64
            };
            match expected.iter_mut().find(|row| fits(row)) {
                Some(row) => row.push(index),
                None => expected.push(vec![index]),
            }
        }
        for row in &mut expected {
            row.sort_unstable();
        }
        assert_eq!(rows(&lengths, Packing::FirstFit, 64), expected);
    }

    #[test]
    fn a_million_conversations_are_packed_fast() {
        let lengths: Vec<_> =
            shuffled(1_000_000, 1, 0).into_iter().map(|number| number % 2000 + 1).collect();
        let started = std::time::Instant::now();
        let rows = Rows::of_lengths(&lengths, Packing::FirstFit, 2048).unwrap();
        assert!(rows.len() >= 488_525, "{}", rows.len());
        assert!(started.elapsed().as_secs() < 60, "{:?}", started.elapsed());
    }
}
