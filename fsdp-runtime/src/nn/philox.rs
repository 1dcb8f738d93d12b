//! Philox4x32-10, a counter-based generator: what it draws is a function of a key and a position.
//!
//! Salmon, Moraes, Dror and Shaw: *Parallel random numbers: as easy as 1, 2, 3* (SC 2011).

/// Blocks computed side by side, for the compiler to vectorise.
pub(crate) const LANES: usize = 8;

pub(crate) const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
pub(crate) const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
pub(crate) const ROUNDS: usize = 10;

/// `LANES` consecutive blocks of four words, from block `first` on; word `w` of block `first + i`
/// is `[w][i]`. A block's counter is its number (low, high) and `place`.
#[inline(always)]
pub(crate) fn blocks(key: [u32; 2], first: u64, place: [u32; 2]) -> [[u32; LANES]; 4] {
    let number = |i: usize| first.wrapping_add(i as u64);
    let mut words = [
        std::array::from_fn(|i| number(i) as u32),
        std::array::from_fn(|i| (number(i) >> 32) as u32),
        [place[0]; LANES],
        [place[1]; LANES],
    ];
    let mut key = key;
    for _ in 0..ROUNDS {
        let [a, b, c, d] = words;
        let product = |lanes: [u32; LANES], multiplier: u32| {
            lanes.map(|lane| u64::from(lane) * u64::from(multiplier))
        };
        let (p, q) = (product(a, MULTIPLIERS[0]), product(c, MULTIPLIERS[1]));
        words = [
            std::array::from_fn(|i| (q[i] >> 32) as u32 ^ b[i] ^ key[0]),
            q.map(|q| q as u32),
            std::array::from_fn(|i| (p[i] >> 32) as u32 ^ d[i] ^ key[1]),
            p.map(|p| p as u32),
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of Random123, the authors' own implementation (`kat_vectors`).
    #[test]
    fn known_answers() {
        let first = |key, first, place| blocks(key, first, place).map(|word| word[0]);
        assert_eq!(first([0, 0], 0, [0, 0]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            first([u32::MAX; 2], u64::MAX, [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            first([0xa409_3822, 0x299f_31d0], 0x85a3_08d3_243f_6a88, [0x1319_8a2e, 0x0370_7344]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn a_block_does_not_depend_on_its_lane() {
        let late = blocks([3, 4], 5, [6, 7]);
        let early = blocks([3, 4], 2, [6, 7]);
        for word in 0..4 {
            assert_eq!(early[word][3], late[word][0]);
        }
    }
}
