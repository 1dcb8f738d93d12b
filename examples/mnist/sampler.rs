//! Choice of the digits that a rank trains on and tests: PyTorch's `DistributedSampler`.

use rand::seq::SliceRandom;

use crate::common::training::epoch_rng;

/// Deals the digits of a split to ranks. All ranks get as many, because every forward and backward
/// of a sharded model is a collective: the first digits are dealt again where the split does not
/// divide.
#[derive(Clone, Copy, Debug)]
pub struct DistributedSampler {
    /// Number of digits in the split.
    pub len: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Number of this rank.
    pub rank: usize,
}

/// Digits of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Indices of the digits in the split.
    pub indices: Vec<usize>,
    /// Number of digits at the front that no other rank has too.
    pub counted: usize,
}

impl DistributedSampler {
    /// Returns this rank's part of the digits in the order of an epoch. The order depends on `seed`
    /// and `epoch` only, and is the same on every rank.
    pub fn shuffled(&self, seed: u64, epoch: usize) -> Share {
        let mut order: Vec<usize> = (0..self.len).collect();
        order.shuffle(&mut epoch_rng(seed, epoch));
        self.deal(&order)
    }

    /// Returns this rank's part of the digits in their own order.
    pub fn in_order(&self) -> Share {
        self.deal(&(0..self.len).collect::<Vec<_>>())
    }

    /// Deals every `world_size`-th index to this rank.
    fn deal(&self, order: &[usize]) -> Share {
        let each = order.len().div_ceil(self.world_size);
        let places = (0..each).map(|at| at * self.world_size + self.rank);
        Share {
            counted: places.clone().filter(|place| *place < order.len()).count(),
            indices: places.map(|place| order[place % order.len()]).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(len: usize, world_size: usize, deal: fn(&DistributedSampler) -> Share) -> Vec<Share> {
        (0..world_size).map(|rank| deal(&DistributedSampler { len, world_size, rank })).collect()
    }

    #[test]
    fn every_digit_is_dealt_to_one_rank() {
        for (len, world) in [(4000, 2), (10, 3), (3, 5), (7, 1)] {
            let shares = shares(len, world, |sampler| sampler.shuffled(1, 3));
            let mut dealt: Vec<usize> =
                shares.iter().flat_map(|share| share.indices[..share.counted].to_vec()).collect();
            dealt.sort_unstable();
            assert_eq!(dealt, (0..len).collect::<Vec<_>>());
            assert!(shares.iter().all(|share| share.indices.len() == len.div_ceil(world)));
        }
    }

    #[test]
    fn the_order_changes_with_the_epoch_and_the_seed() {
        let sampler = DistributedSampler { len: 100, world_size: 2, rank: 1 };
        let first = sampler.shuffled(1, 1);
        assert_eq!(first, sampler.shuffled(1, 1));
        assert_ne!(first, sampler.shuffled(1, 2));
        assert_ne!(first, sampler.shuffled(2, 1));
        assert_ne!(first, sampler.in_order());
    }

    #[test]
    fn digits_that_are_dealt_twice_count_once() {
        let shares = shares(5, 2, DistributedSampler::in_order);
        assert_eq!(shares[0], Share { indices: vec![0, 2, 4], counted: 3 });
        assert_eq!(shares[1], Share { indices: vec![1, 3, 0], counted: 2 });
    }
}
