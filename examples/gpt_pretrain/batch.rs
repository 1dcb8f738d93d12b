//! Division of the text into samples, and their assignment to updates and ranks.
//!
//! A sample is a block of the text. Blocks follow one another without a gap. The blocks of an
//! update are chosen for all ranks together and then assigned in order. Therefore two ranks with
//! batches of 8 train on the same blocks per update as one rank with batches of 16. Blocks that do
//! not fill an update are left out of an epoch; the shuffle chooses other ones in each epoch.
//!
//! Evaluation covers every word piece once. A rank that has no block left repeats one that is not
//! counted, because its peers need it for the collectives of the forward.

use anyhow::{Result, ensure};
use burn::tensor::{Device, Int, Tensor, TensorData};
use fsdp_runtime::Mesh;
use rand::seq::SliceRandom;

use crate::common::training::epoch_rng;
use crate::tokens::Tokens;

/// Text divided into blocks. The targets of a block are its word pieces shifted by one.
#[derive(Clone, Debug)]
pub struct Blocks {
    pieces: Tokens,
    length: usize,
}

impl Blocks {
    /// Divides a text into blocks of `length` word pieces.
    ///
    /// # Errors
    ///
    /// If the text is too short for one block.
    pub fn new(pieces: impl Into<Tokens>, length: usize) -> Result<Self> {
        let pieces = pieces.into();
        ensure!(
            pieces.len() > length,
            "{} word pieces are too few for one sample of {length} and the word piece after it; \
             lower --tokens-per-sample",
            pieces.len()
        );
        Ok(Self { pieces, length })
    }

    /// Returns the number of complete blocks.
    pub fn len(&self) -> usize {
        self.predicted() / self.length
    }

    /// Returns the number of word pieces that are predicted: all but the first.
    pub fn predicted(&self) -> usize {
        self.pieces.len() - 1
    }

    /// Copies blocks to a device. Returns the inputs, `[rows, length]`, and the targets,
    /// `[rows * length]`. The incomplete block at the end of the text has the index
    /// [`len`](Self::len), is shorter, and must be the only row.
    ///
    /// # Errors
    ///
    /// If the blocks cannot be read from their file.
    pub fn batch(
        &self,
        rows: &[usize],
        device: &Device,
    ) -> Result<(Tensor<2, Int>, Tensor<1, Int>)> {
        let (mut input, mut target) = (Vec::new(), Vec::new());
        for row in rows {
            let start = row * self.length;
            let end = (start + self.length).min(self.predicted());
            let pieces = self.pieces.read(start..end + 1)?;
            let ints =
                |pieces: &[u32]| pieces.iter().map(|piece| *piece as i32).collect::<Vec<_>>();
            input.extend(ints(&pieces[..pieces.len() - 1]));
            target.extend(ints(&pieces[1..]));
        }
        let (length, all) = (input.len() / rows.len().max(1), target.len());
        Ok((
            Tensor::from_data(TensorData::new(input, [rows.len(), length]), device),
            Tensor::from_data(TensorData::new(target, [all]), device),
        ))
    }

    /// Copies this rank's part of blocks to a device, as [`batch`](Self::batch) does. Of an incomplete block the end
    /// is left out that the ranks of `mesh` cannot share.
    ///
    /// # Errors
    ///
    /// If the blocks cannot be read from their file.
    pub fn part(
        &self,
        rows: &[usize],
        mesh: Mesh,
        device: &Device,
    ) -> Result<(Tensor<2, Int>, Tensor<1, Int>)> {
        let (input, target) = self.batch(rows, device)?;
        let ranks = mesh.context_size().size();
        if ranks == 1 {
            return Ok((input, target));
        }
        let [rows, length] = input.dims();
        let shared = length - length % (2 * ranks);
        let part = mesh.context_part(shared)?;
        let target = target.reshape([rows, length]).narrow(1, 0, shared);
        Ok((part.of(input.narrow(1, 0, shared), 1), part.of(target, 1).flatten(0, 1)))
    }
}

/// Assigns blocks to updates and ranks.
#[derive(Clone, Copy, Debug)]
pub struct Dealer {
    /// Number of ranks.
    pub world_size: usize,
    /// Blocks in a batch, per rank.
    pub batch_size: usize,
    /// Batches in an update, per rank.
    pub update_freq: usize,
}

impl Dealer {
    /// Returns the number of blocks in an update, over all ranks.
    pub fn per_update(&self) -> usize {
        self.world_size * self.batch_size * self.update_freq
    }

    /// Returns the number of updates in an epoch over `blocks` blocks.
    ///
    /// # Errors
    ///
    /// If the blocks do not fill a single update.
    pub fn updates_per_epoch(&self, blocks: usize) -> Result<usize> {
        ensure!(
            blocks >= self.per_update(),
            "the text has {blocks} samples, fewer than one update takes: {} ranks x {} x {}; lower \
             --tokens-per-sample, --batch-size or --update-freq",
            self.world_size,
            self.batch_size,
            self.update_freq
        );
        Ok(blocks / self.per_update())
    }

    /// Returns the blocks of an epoch in the order of training, the same on every rank.
    pub fn epoch(&self, blocks: usize, seed: u64, epoch: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..blocks).collect();
        order.shuffle(&mut epoch_rng(seed, epoch));
        order
    }

    /// Returns the blocks of one rank in batch `batch` of update `update` of an epoch with this
    /// order.
    pub fn share<'a>(
        &self,
        order: &'a [usize],
        update: usize,
        batch: usize,
        rank: usize,
    ) -> &'a [usize] {
        let before = (update * self.update_freq + batch) * self.world_size + rank;
        &order[before * self.batch_size..(before + 1) * self.batch_size]
    }

    /// Returns the batches of one rank in an evaluation, and whether each counts. Every rank has
    /// the same number of batches, and each block counts on one rank, including the incomplete last
    /// block if it has at least `least` word pieces.
    pub fn evaluation(
        &self,
        blocks: &Blocks,
        rank: usize,
        least: usize,
    ) -> Vec<(Vec<usize>, bool)> {
        let whole: Vec<usize> = (0..blocks.len()).collect();
        let mut batches: Vec<Vec<usize>> =
            whole.chunks(self.batch_size).map(<[usize]>::to_vec).collect();
        if blocks.predicted() % blocks.length >= least {
            batches.push(vec![blocks.len()]);
        }
        let rounds = batches.chunks(self.world_size);
        let share = |round: &[Vec<usize>]| match round.get(rank) {
            Some(batch) => (batch.clone(), true),
            None => (round[0].clone(), false),
        };
        rounds.map(share).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dealer(world_size: usize, batch_size: usize, update_freq: usize) -> Dealer {
        Dealer { world_size, batch_size, update_freq }
    }

    fn blocks(pieces: u32, length: usize) -> Blocks {
        Blocks::new((0..pieces).collect::<Vec<_>>(), length).unwrap()
    }

    fn ints<const D: usize>(tensor: Tensor<D, Int>) -> Vec<i64> {
        tensor.into_data().iter::<i64>().collect()
    }

    #[test]
    fn targets_are_one_ahead() {
        let device = crate::common::device::DeviceName::Flex.resolve().unwrap();
        let blocks = blocks(12, 4);
        assert_eq!(blocks.len(), 2);
        let (input, target) = blocks.batch(&[1, 0], &device).unwrap();
        assert_eq!(input.dims(), [2, 4]);
        assert_eq!(ints(input), [4, 5, 6, 7, 0, 1, 2, 3]);
        assert_eq!(ints(target), [5, 6, 7, 8, 1, 2, 3, 4]);
        let (input, target) = blocks.batch(&[2], &device).unwrap();
        assert_eq!((ints(input), ints(target)), (vec![8, 9, 10], vec![9, 10, 11]));
        assert!(Blocks::new((0..4).collect::<Vec<_>>(), 4).is_err());
    }

    #[test]
    fn an_update_is_the_same_however_it_is_dealt() {
        let order = dealer(1, 12, 1).epoch(50, 3, 1);
        let all = |dealer: Dealer, update| -> Vec<usize> {
            let batches = (0..dealer.update_freq)
                .flat_map(|batch| (0..dealer.world_size).map(move |rank| (batch, rank)));
            batches
                .flat_map(|(batch, rank)| dealer.share(&order, update, batch, rank).to_vec())
                .collect()
        };
        for update in 0..4 {
            let expected = all(dealer(1, 12, 1), update);
            assert_eq!(all(dealer(2, 6, 1), update), expected);
            assert_eq!(all(dealer(2, 3, 2), update), expected);
            assert_eq!(all(dealer(3, 1, 4), update), expected);
        }
        assert_eq!(dealer(2, 3, 2).updates_per_epoch(50).unwrap(), 4);
        assert!(dealer(2, 3, 10).updates_per_epoch(50).is_err());
    }

    #[test]
    fn epochs_and_seeds_are_shuffled_apart() {
        let order = |seed, epoch| dealer(1, 1, 1).epoch(40, seed, epoch);
        let mut sorted = order(1, 0);
        assert_eq!(order(1, 0), sorted);
        assert!(order(1, 0) != order(1, 1) && order(1, 0) != order(2, 0));
        sorted.sort_unstable();
        assert_eq!(sorted, (0..40).collect::<Vec<_>>());
    }

    #[test]
    fn evaluation_covers_every_block_once() {
        for (pieces, world, batch) in [(101, 2, 3), (99, 3, 4), (17, 4, 2), (9, 3, 1)] {
            let blocks = blocks(pieces, 8);
            let dealer = dealer(world, batch, 1);
            let of_ranks: Vec<_> =
                (0..world).map(|rank| dealer.evaluation(&blocks, rank, 1)).collect();
            assert!(of_ranks.iter().all(|batches| batches.len() == of_ranks[0].len()));
            let counted = of_ranks.iter().flatten().filter(|(_, counts)| *counts);
            let mut rows: Vec<usize> = counted.flat_map(|(rows, _)| rows.clone()).collect();
            rows.sort_unstable();
            assert_eq!(rows, (0..blocks.predicted().div_ceil(8)).collect::<Vec<_>>());
        }
    }
}
