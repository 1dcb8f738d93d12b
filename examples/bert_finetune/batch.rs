//! Which examples make up each step, and which rank holds which of them.
//!
//! Training forms *global* batches first and then deals their rows to the ranks in order. So every
//! rank takes the same number of steps, and two ranks of 8 see in each step the 16 examples that one
//! rank of 16 would. Examples of about one length share a batch, which leaves little padding and gives
//! the ranks about equal work. What does not fill a global batch sits out an epoch, a different rest
//! each time. Evaluation covers every example once; a rank with nothing left repeats a row that does
//! not count, since its peers still need it for the collectives of the forward.

use anyhow::{Result, ensure};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use crate::tokenize::Encoded;

/// Global batches that are sorted by length together: large enough that batches are even, small
/// enough that an epoch stays well shuffled.
const POOL: usize = 32;

/// How the examples of a split are dealt to ranks.
#[derive(Clone, Copy, Debug)]
pub struct Dealer {
    /// Number of ranks.
    pub world_size: usize,
    /// Examples in a batch, per rank.
    pub batch_size: usize,
}

impl Dealer {
    /// Examples in a step, over all ranks.
    pub fn global_batch(&self) -> usize {
        self.world_size * self.batch_size
    }

    /// Steps in an epoch over `examples` examples.
    ///
    /// # Errors
    ///
    /// If they do not fill a single global batch.
    pub fn steps_per_epoch(&self, examples: usize) -> Result<usize> {
        ensure!(
            examples >= self.global_batch(),
            "the training split has {examples} examples, fewer than one step takes: {} ranks x {}",
            self.world_size,
            self.batch_size
        );
        Ok(examples / self.global_batch())
    }

    /// The global batches of one epoch, as indices into `lengths`: the same on every rank.
    pub fn epoch(&self, lengths: &[usize], seed: u64, epoch: usize) -> Vec<Vec<usize>> {
        let size = self.global_batch();
        // The odd factor keeps seeds and epochs apart: seed 1 in epoch 0 is not seed 0 in epoch 1.
        let epoch = (epoch as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut random = StdRng::seed_from_u64(seed ^ epoch);
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        order.shuffle(&mut random);
        order.truncate(order.len() / size * size);
        let mut batches: Vec<Vec<usize>> = Vec::with_capacity(order.len() / size);
        for pool in order.chunks_mut(size * POOL) {
            pool.sort_by_key(|index| lengths[*index]);
            batches.extend(pool.chunks(size).map(<[usize]>::to_vec));
        }
        // Sorted rows would give the last rank the longest of every batch.
        batches.iter_mut().for_each(|batch| batch.shuffle(&mut random));
        batches.shuffle(&mut random);
        batches
    }

    /// The rows of a global batch that are `rank`'s.
    pub fn share<'a>(&self, batch: &'a [usize], rank: usize) -> &'a [usize] {
        &batch[rank * self.batch_size..(rank + 1) * self.batch_size]
    }

    /// `rank`'s batches of an evaluation: every rank has the same number of them, and over all ranks
    /// each example counts once.
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

/// A rank's part of one step of an evaluation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvalShare {
    /// Indices of the examples, at least one.
    pub rows: Vec<usize>,
    /// How many of them, from the first, count.
    pub counted: usize,
}

/// Examples side by side, filled up to the longest of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Padded {
    /// Rows and columns.
    pub shape: [usize; 2],
    /// Word pieces, row by row.
    pub ids: Vec<i32>,
    /// Segments, row by row.
    pub types: Vec<i32>,
    /// Whether a place is filling, row by row.
    pub padding: Vec<bool>,
    /// The class of each row.
    pub labels: Vec<i32>,
}

impl Padded {
    /// Collects the examples at `rows`.
    pub fn new(examples: &[Encoded], rows: &[usize], pad: u32) -> Self {
        let width = rows.iter().map(|row| examples[*row].ids.len()).max().unwrap_or(0);
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
            batch.ids.resize(end, pad as i32);
            batch.types.resize(end, 0);
            batch.padding.resize(end, true);
            batch.labels.push(example.label as i32);
        }
        batch
    }

    /// Whether any place is filling.
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
        assert!(padded * 100 < real * 105, "{padded} places for {real} pieces");
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
        let batch = Padded::new(&examples, &[0, 1], 3);
        assert_eq!(batch.shape, [2, 3]);
        assert_eq!(batch.ids, [7, 8, 9, 4, 3, 3]);
        assert_eq!(batch.types, [1, 1, 1, 1, 0, 0]);
        assert_eq!(batch.padding, [false, false, false, false, true, true]);
        assert_eq!(batch.labels, [1, 0]);
        assert!(batch.is_padded());
        assert!(!Padded::new(&examples, &[2], 3).is_padded());
    }
}
