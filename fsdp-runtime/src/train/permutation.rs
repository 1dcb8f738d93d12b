//! The order of a dataset's items in an epoch.

use fsdp_kernels::philox::{LANES, blocks};

/// Returns the numbers below `len` in the order of an epoch, a function of `len`, `seed` and
/// `epoch` alone: the shuffle of Fisher and Yates with numbers of Philox.
pub(super) fn permutation(len: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..len).collect();
    let mut numbers = Numbers::new(seed, epoch);
    for last in (1..len).rev() {
        order.swap(last, numbers.below(last + 1));
    }
    order
}

/// A stream of random 64-bit numbers.
struct Numbers {
    key: [u32; 2],
    counter: [u32; 2],
    next_batch: u64,
    ready: Vec<u64>,
}

impl Numbers {
    fn new(seed: u64, epoch: u64) -> Self {
        let words = |number: u64| [number as u32, (number >> 32) as u32];
        Self { key: words(seed), counter: words(epoch), next_batch: 0, ready: Vec::new() }
    }

    fn next(&mut self) -> u64 {
        if self.ready.is_empty() {
            let [a, b, c, d] = blocks(self.key, self.next_batch, self.counter);
            self.next_batch += 1;
            let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
            let lanes = (0..LANES).flat_map(|i| [pair(a[i], b[i]), pair(c[i], d[i])]);
            self.ready.extend(lanes.rev());
        }
        self.ready.pop().expect("a batch of blocks was just added")
    }

    /// Returns a number below `bound`. Its probability differs from 1 / `bound` by less than 2⁻⁶⁴.
    fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_occurs_once_and_seeds_and_epochs_differ() {
        let order = permutation(1000, 7, 3);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1000).collect::<Vec<_>>());
        assert_eq!(order, permutation(1000, 7, 3));
        assert_ne!(order, permutation(1000, 7, 4));
        assert_ne!(order, permutation(1000, 8, 3));
        assert!(permutation(0, 1, 1).is_empty());
    }

    /// Compares the mean position of each item over many epochs with that of a fair shuffle: each
    /// deviates by more than six standard errors with a probability below 1 in 10⁷.
    #[test]
    fn items_are_shuffled_fairly() {
        let (len, epochs) = (10, 4000);
        let mut sums = vec![0; len];
        for epoch in 0..epochs {
            let order = permutation(len, 5, epoch);
            order.iter().enumerate().for_each(|(place, item)| sums[*item] += place);
        }
        let expected = (len - 1) as f64 / 2.0;
        let deviation = (((len * len - 1) as f64) / 12.0).sqrt() / (epochs as f64).sqrt();
        for sum in sums {
            let mean = sum as f64 / epochs as f64;
            assert!((mean - expected).abs() < 6.0 * deviation, "{mean}");
        }
    }
}
