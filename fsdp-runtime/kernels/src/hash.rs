//! SplitMix64's mixing function, for seeds and checksums.

/// Returns the output of SplitMix64's finalizer, in which every bit depends on every bit of `word`.
///
/// Source: Steele, Lea and Flood, *Fast splittable pseudorandom number generators* (OOPSLA 2014).
pub fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}
