//! Random orders that are equal on every platform and for any number of ranks.

use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Returns the numbers below `count` in a random order. Each `stream` of a seed has its own.
///
/// This is the shuffle of Fisher and Yates with ChaCha8. A place is the upper half of the product
/// of 64 random bits and the number of places; its bias is below `count / 2^64`.
pub fn shuffled(count: usize, seed: u64, stream: u64) -> Vec<usize> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(stream);
    let mut order: Vec<usize> = (0..count).collect();
    for last in (1..count).rev() {
        let places = last as u128 + 1;
        let place = (u128::from(random.next_u64()) * places) >> 64;
        order.swap(last, place as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_fixed_by_seed_and_stream() {
        let order = shuffled(8, 1, 0);
        // Written down, so that a new version of a crate cannot change it unnoticed.
        assert_eq!(order, FIXED);
        assert_ne!(order, shuffled(8, 1, 1));
        assert_ne!(order, shuffled(8, 2, 0));
        assert!(shuffled(0, 1, 0).is_empty());
        let mut all = shuffled(1000, 5, 9);
        all.sort_unstable();
        assert_eq!(all, (0..1000).collect::<Vec<_>>());
    }

    const FIXED: [usize; 8] = [5, 6, 2, 4, 1, 7, 0, 3];
}
