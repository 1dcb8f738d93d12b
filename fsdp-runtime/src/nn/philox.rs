//! Philox4x32-7, a counter-based generator: what it draws is a function of a key and a position.
//!
//! Salmon, Moraes, Dror and Shaw: *Parallel random numbers: as easy as 1, 2, 3* (SC 2011). Seven rounds
//! are the fewest that pass all of BigCrush (table 2 there).

/// Blocks computed side by side, for the compiler to vectorise: two of the widest registers.
pub(crate) const LANES: usize = 32;

pub(crate) const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
pub(crate) const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
pub(crate) const ROUNDS: usize = 7;

/// `LANES` consecutive blocks of four words, from block `first` on; word `w` of block `first + i`
/// is `[w][i]`. A block's counter is its number (low, high) and `place`.
#[inline(always)]
pub(crate) fn blocks(key: [u32; 2], first: u64, place: [u32; 2]) -> [[u32; LANES]; 4] {
    let (mut low, mut high) = ([0; LANES], [0; LANES]);
    // Loops, since a closure that is not inlined would be compiled for the oldest processors.
    for lane in 0..LANES {
        let number = first.wrapping_add(lane as u64);
        (low[lane], high[lane]) = (number as u32, (number >> 32) as u32);
    }
    let mut words = [low, high, [place[0]; LANES], [place[1]; LANES]];
    let mut key = key;
    for _ in 0..ROUNDS {
        let [a, b, c, d] = &mut words;
        for lane in 0..LANES {
            let high =
                |word: u32, factor: u32| ((u64::from(word) * u64::from(factor)) >> 32) as u32;
            let (p, q) = (a[lane], c[lane]);
            a[lane] = high(q, MULTIPLIERS[1]) ^ b[lane] ^ key[0];
            b[lane] = q.wrapping_mul(MULTIPLIERS[1]);
            c[lane] = high(p, MULTIPLIERS[0]) ^ d[lane] ^ key[1];
            d[lane] = p.wrapping_mul(MULTIPLIERS[0]);
        }
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
        assert_eq!(first([0, 0], 0, [0, 0]), [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48]);
        assert_eq!(
            first([u32::MAX; 2], u64::MAX, [u32::MAX; 2]),
            [0x5207_ddc2, 0x4516_5e59, 0x4d8e_e751, 0x8c52_f662]
        );
        assert_eq!(
            first([0xa409_3822, 0x299f_31d0], 0x85a3_08d3_243f_6a88, [0x1319_8a2e, 0x0370_7344]),
            [0x4dfc_caba, 0x190a_87f0, 0xc473_62ba, 0xb6b5_242a]
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
