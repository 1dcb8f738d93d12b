//! Philox4x32-7, a counter-based random generator: its output depends only on a key and a counter.
//!
//! Source: Salmon, Moraes, Dror and Shaw, *Parallel random numbers: as easy as 1, 2, 3* (SC 2011).
//! Seven rounds are the fewest that pass all of BigCrush (table 2 of that paper).

/// Number of blocks that [`blocks`] computes at once, so that the compiler vectorises the rounds.
/// With 32 blocks the intermediate words would not fit the vector registers.
pub const LANES: usize = 16;

/// Multipliers of the two products of a round.
pub(crate) const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Amounts added to the two words of the key after each round.
pub(crate) const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
/// Number of rounds.
pub(crate) const ROUNDS: usize = 7;

/// Returns `LANES` consecutive blocks of four random words: word `w` of block `batch · LANES + i`
/// is at `[w][i]`. The counter of a block is its number (low word, high word) followed by
/// `counter`.
///
/// Values of the first two rounds that are equal in all lanes are computed once.
#[allow(clippy::needless_range_loop, reason = "a lane indexes four arrays")]
#[inline(always)]
pub fn blocks(key: [u32; 2], batch: u64, counter: [u32; 2]) -> [[u32; LANES]; 4] {
    let first = batch.wrapping_mul(LANES as u64);
    let mut keys = key;
    let mut next = || {
        let key = keys;
        keys = [keys[0].wrapping_add(WEYL[0]), keys[1].wrapping_add(WEYL[1])];
        key
    };
    let [p, q] = MULTIPLIERS;

    // First round: lanes differ only in the low word of the block number.
    let key = next();
    let a = high(counter[0], q) ^ (first >> 32) as u32 ^ key[0];
    let b = counter[0].wrapping_mul(q);
    let other = counter[1] ^ key[1];
    // Second round: the product of `a` is equal in all lanes.
    let key = next();
    let (mut words, of_a) = ([[0; LANES]; 4], high(a, p) ^ key[1]);
    words[3] = [a.wrapping_mul(p); LANES];
    // Loops instead of closures: a closure that is not inlined would be compiled without the vector
    // instructions of the caller's `multiversion` target.
    for lane in 0..LANES {
        let number = first as u32 | lane as u32;
        let c = high(number, p) ^ other;
        words[0][lane] = high(c, q) ^ b ^ key[0];
        words[1][lane] = c.wrapping_mul(q);
        words[2][lane] = number.wrapping_mul(p) ^ of_a;
    }

    for _ in 2..ROUNDS {
        let key = next();
        let [a, b, c, d] = &mut words;
        for lane in 0..LANES {
            let (even, odd) = (a[lane], c[lane]);
            a[lane] = high(odd, q) ^ b[lane] ^ key[0];
            b[lane] = odd.wrapping_mul(q);
            c[lane] = high(even, p) ^ d[lane] ^ key[1];
            d[lane] = even.wrapping_mul(p);
        }
    }
    words
}

/// Returns the upper 32 bits of the 64-bit product.
#[inline(always)]
fn high(word: u32, factor: u32) -> u32 {
    ((u64::from(word) * u64::from(factor)) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the known answers of Random123, the implementation by the paper's authors
    /// (`kat_vectors`).
    #[test]
    fn known_answers() {
        let block = |key, number: u64, counter| {
            let lanes = LANES as u64;
            blocks(key, number / lanes, counter).map(|word| word[(number % lanes) as usize])
        };
        assert_eq!(block([0, 0], 0, [0, 0]), [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48]);
        assert_eq!(
            block([u32::MAX; 2], u64::MAX, [u32::MAX; 2]),
            [0x5207_ddc2, 0x4516_5e59, 0x4d8e_e751, 0x8c52_f662]
        );
        assert_eq!(
            block([0xa409_3822, 0x299f_31d0], 0x85a3_08d3_243f_6a88, [0x1319_8a2e, 0x0370_7344]),
            [0x4dfc_caba, 0x190a_87f0, 0xc473_62ba, 0xb6b5_242a]
        );
    }

    /// Compares each lane with the published algorithm, which computes one block at a time.
    #[test]
    fn each_lane_holds_the_block_of_its_number() {
        let (key, counter) = ([3, 4], [6, 7]);
        for batch in [0, 5, u64::from(u32::MAX) / LANES as u64 + 1] {
            let words = blocks(key, batch, counter);
            for lane in 0..LANES {
                let number = batch * LANES as u64 + lane as u64;
                let mut block = [number as u32, (number >> 32) as u32, counter[0], counter[1]];
                let mut key: [u32; 2] = key;
                for _ in 0..ROUNDS {
                    let [a, b, c, d] = block;
                    let product =
                        |word: u32, at: usize| u64::from(word) * u64::from(MULTIPLIERS[at]);
                    let (p, q) = (product(a, 0), product(c, 1));
                    let (p_high, q_high) = ((p >> 32) as u32, (q >> 32) as u32);
                    block = [q_high ^ b ^ key[0], q as u32, p_high ^ d ^ key[1], p as u32];
                    key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
                }
                assert_eq!(words.map(|word| word[lane]), block, "{batch} {lane}");
            }
        }
    }
}
