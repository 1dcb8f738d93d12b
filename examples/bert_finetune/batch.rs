//! Assignment of examples to steps and ranks, and padding of a batch.
//!
//! Training forms *global* batches first and then assigns their rows to the ranks in order.
//! Therefore all ranks take the same number of steps, and two ranks with batches of 8 train on the
//! same 16 examples per step as one rank with batches of 16. Examples of similar length share a
//! batch, so that there is little padding and ranks have similar work. Examples that do not fill a
//! global batch are left out of an epoch; the shuffle chooses other ones in each epoch.
//!
//! Evaluation covers every example once. A rank that has no example left in a step repeats one that
//! is not counted, because its peers need it for the collectives of the forward.

use anyhow::{Result, ensure};
use rand::seq::SliceRandom;

use crate::common::training::epoch_rng;
use crate::tokenizer::Encoded;

/// Number of global batches that are sorted by length together. With more, the lengths in a batch
/// are more similar; with fewer, the epoch is better shuffled.
const POOL: usize = 32;

/// Assigns the examples of a split to steps and ranks.
#[derive(Clone, Copy, Debug)]
pub struct Dealer {
    /// Number of ranks.
    pub world_size: usize,
    /// Examples in a batch, per rank.
    pub batch_size: usize,
}

impl Dealer {
    /// Returns the number of examples in a step, over all ranks.
    pub fn global_batch(&self) -> usize {
        self.world_size * self.batch_size
    }

    /// Returns the number of steps in an epoch over `examples` examples.
    ///
    /// # Errors
    ///
    /// If the examples do not fill a single global batch.
    pub fn steps_per_epoch(&self, examples: usize) -> Result<usize> {
        ensure!(
            examples >= self.global_batch(),
            "the training split has {examples} examples, fewer than one step takes: {} ranks x {}",
            self.world_size,
            self.batch_size
        );
        Ok(examples / self.global_batch())
    }

    /// Returns the global batches of one epoch as indices into `lengths`, the same on every rank.
    pub fn epoch(&self, lengths: &[usize], seed: u64, epoch: usize) -> Vec<Vec<usize>> {
        let size = self.global_batch();
        let mut random = epoch_rng(seed, epoch);
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        order.shuffle(&mut random);
        order.truncate(order.len() / size * size);
        let mut batches: Vec<Vec<usize>> = Vec::with_capacity(order.len() / size);
        for pool in order.chunks_mut(size * POOL) {
            pool.sort_by_key(|index| lengths[*index]);
            batches.extend(pool.chunks(size).map(<[usize]>::to_vec));
        }
        // Rows in sorted order would give the last rank the longest examples of every batch.
        batches.iter_mut().for_each(|batch| batch.shuffle(&mut random));
        batches.shuffle(&mut random);
        batches
    }

    /// Returns the rows of a global batch that belong to `rank`.
    pub fn share<'a>(&self, batch: &'a [usize], rank: usize) -> &'a [usize] {
        &batch[rank * self.batch_size..(rank + 1) * self.batch_size]
    }

    /// Returns the batches of `rank` in an evaluation. Every rank has the same number of batches,
    /// and each example counts on one rank.
    pub fn evaluation(&self, lengths: &[usize], rank: usize) -> Vec<EvalShare> {
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        order.sort_by_key(|index| lengths[*index]);
        let shares = order.chunks(self.global_batch()).map(|batch| {
            let bound = |rank| rank * batch.len() / self.world_size;
            let rows = &batch[bound(rank)..bound(rank + 1)];
            EvalShare {
                rows: if rows.is_empty() { vec![batch[0]] } else { rows.to_vec() },
                counted: rows.len(),
            }
        });
        shares.collect()
    }
}

/// Rows of one rank in one step of an evaluation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvalShare {
    /// Indices of examples, at least one.
    pub rows: Vec<usize>,
    /// Number of leading rows that count. The others repeat rows of other ranks.
    pub counted: usize,
}

/// How the rows of a batch are filled up.
#[derive(Clone, Copy, Debug)]
pub struct Padding {
    /// Id of the padding token.
    pub token: u32,
    /// Divisor of the length of a batch, unless that is `max_length`.
    pub multiple_of: usize,
    /// Maximum length of an example, in word pieces.
    pub max_length: usize,
}

impl Padding {
    /// Fills rows up to the longest.
    #[cfg(test)]
    pub fn to_longest(token: u32) -> Self {
        Self { token, multiple_of: 1, max_length: usize::MAX }
    }

    /// Returns the length of a batch whose longest example has `longest` word pieces.
    fn width(&self, longest: usize) -> usize {
        longest.next_multiple_of(self.multiple_of).min(self.max_length.max(longest))
    }
}

/// Batch of examples of one length, padded. Matrices are in row-major order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Padded {
    /// Shape `[batch, length]` of the matrices.
    pub shape: [usize; 2],
    /// Word-piece ids, `[batch, length]`.
    pub ids: Vec<i32>,
    /// Token types, `[batch, length]`.
    pub types: Vec<i32>,
    /// Whether a position is padding, `[batch, length]`.
    pub padding: Vec<bool>,
    /// Classes, `[batch]`.
    pub labels: Vec<i32>,
}

impl Padded {
    /// Pads the examples at `rows`.
    pub fn new(examples: &[Encoded], rows: &[usize], padding: Padding) -> Self {
        let longest = rows.iter().map(|row| examples[*row].ids.len()).max().unwrap_or(0);
        let width = padding.width(longest);
        let places = rows.len() * width;
        let mut batch = Self {
            shape: [rows.len(), width],
            ids: Vec::with_capacity(places),
            types: Vec::with_capacity(places),
            padding: Vec::with_capacity(places),
            labels: Vec::with_capacity(rows.len()),
        };
        for example in rows.iter().map(|row| &examples[*row]) {
            let end = batch.ids.len() + width;
            batch.ids.extend(example.ids.iter().map(|id| *id as i32));
            batch.types.extend(example.types.iter().map(|id| *id as i32));
            batch.padding.resize(batch.ids.len(), false);
            batch.ids.resize(end, padding.token as i32);
            batch.types.resize(end, 0);
            batch.padding.resize(end, true);
            batch.labels.push(example.label as i32);
        }
        batch
    }

    /// Returns whether any position is padding.
    pub fn is_padded(&self) -> bool {
        self.padding.contains(&true)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn lengths(count: usize) -> Vec<usize> {
        (0..count).map(|i| 5 + i * 37 % 101).collect()
    }

    #[test]
    fn an_epoch_takes_each_example_at_most_once_and_whole_batches_only() {
        let dealer = Dealer { world_size: 3, batch_size: 4 };
        let epoch = dealer.epoch(&lengths(1000), 7, 0);
        assert_eq!(epoch.len(), dealer.steps_per_epoch(1000).unwrap());
        assert!(epoch.iter().all(|batch| batch.len() == 12));
        let seen: BTreeSet<_> = epoch.iter().flatten().collect();
        assert_eq!(seen.len(), epoch.len() * 12);
    }

    #[test]
    fn seeds_and_epochs_give_other_orders_and_repeat() {
        let dealer = Dealer { world_size: 2, batch_size: 8 };
        let order = |seed, epoch| dealer.epoch(&lengths(500), seed, epoch);
        assert_eq!(order(1, 2), order(1, 2));
        assert_ne!(order(1, 0), order(1, 1));
        assert_ne!(order(1, 0), order(0, 1));
    }

    #[test]
    fn two_ranks_of_eight_hold_the_examples_of_one_rank_of_sixteen() {
        let (two, one) =
            (Dealer { world_size: 2, batch_size: 8 }, Dealer { world_size: 1, batch_size: 16 });
        let (of_two, of_one) = (two.epoch(&lengths(300), 5, 1), one.epoch(&lengths(300), 5, 1));
        assert_eq!(of_two.len(), of_one.len());
        for (batch, whole) in of_two.iter().zip(&of_one) {
            assert_eq!([two.share(batch, 0), two.share(batch, 1)].concat(), one.share(whole, 0));
        }
    }

    #[test]
    fn a_batch_has_about_one_length_and_its_ranks_too() {
        let lengths = lengths(4000);
        let dealer = Dealer { world_size: 2, batch_size: 8 };
        let (mut real, mut padded, mut between) = (0, 0, 0);
        let epoch = dealer.epoch(&lengths, 0, 0);
        for batch in &epoch {
            let longest =
                |rank| dealer.share(batch, rank).iter().map(|row| lengths[*row]).max().unwrap_or(0);
            real += batch.iter().map(|row| lengths[*row]).sum::<usize>();
            padded += 8 * (longest(0) + longest(1));
            between += longest(0).abs_diff(longest(1));
        }
        assert!(padded * 100 < real * 105, "{padded} positions for {real} word pieces");
        assert!(between < 2 * epoch.len(), "{between} between the ranks");
    }

    #[test]
    fn evaluation_counts_each_example_once_in_as_many_steps_on_each_rank() {
        for (world_size, examples) in [(1, 7), (2, 7), (2, 33), (3, 1), (4, 66), (4, 64)] {
            let dealer = Dealer { world_size, batch_size: 8 };
            let lengths = lengths(examples);
            let ranks: Vec<_> =
                (0..world_size).map(|rank| dealer.evaluation(&lengths, rank)).collect();
            assert!(ranks.iter().all(|shares| shares.len() == ranks[0].len()));
            let shares = || ranks.iter().flatten();
            assert!(shares().all(|share| (1..=8).contains(&share.rows.len())));
            let mut counted: Vec<_> =
                shares().flat_map(|share| &share.rows[..share.counted]).copied().collect();
            counted.sort_unstable();
            assert!(counted.into_iter().eq(0..examples), "{world_size} ranks, {examples}");
        }
    }

    #[test]
    fn too_few_examples_are_an_error() {
        let dealer = Dealer { world_size: 2, batch_size: 8 };
        let message = dealer.steps_per_epoch(15).unwrap_err().to_string();
        assert!(message.contains("15 examples, fewer than one step takes: 2 ranks x 8"));
    }

    #[test]
    fn rows_are_filled_up_to_the_longest() {
        let example =
            |ids: &[u32], label| Encoded { ids: ids.to_vec(), types: vec![1; ids.len()], label };
        let examples = [example(&[7, 8, 9], 1), example(&[4], 0), example(&[1; 9], 0)];
        let batch = Padded::new(&examples, &[0, 1], Padding::to_longest(3));
        assert_eq!(batch.shape, [2, 3]);
        assert_eq!(batch.ids, [7, 8, 9, 4, 3, 3]);
        assert_eq!(batch.types, [1, 1, 1, 1, 0, 0]);
        assert_eq!(batch.padding, [false, false, false, false, true, true]);
        assert_eq!(batch.labels, [1, 0]);
        assert!(batch.is_padded());
        assert!(!Padded::new(&examples, &[2], Padding::to_longest(3)).is_padded());
    }

    #[test]
    fn lengths_are_multiples_up_to_the_maximum() {
        let padding = Padding { token: 0, multiple_of: 8, max_length: 30 };
        let widths = [1, 8, 9, 24, 25, 30].map(|longest| padding.width(longest));
        assert_eq!(widths, [8, 8, 16, 24, 30, 30]);
        let example = Encoded { ids: vec![5; 9], types: vec![1; 9], label: 0 };
        let batch = Padded::new(&[example], &[0], padding);
        assert_eq!(batch.shape, [1, 16]);
        assert_eq!(batch.padding.iter().filter(|it| **it).count(), 7);
    }
}
