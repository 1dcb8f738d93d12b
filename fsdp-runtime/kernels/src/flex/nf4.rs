//! Values of blocks of NF4 codes, in f32. A processor with AVX-512 or AVX2 looks several codes up with
//! one instruction, in tables that its registers hold.

use crate::codes::NF4;

/// Number of elements that a call decodes.
pub(super) const CHUNK: usize = 64;

/// Function that writes the values of [`CHUNK`] codes, times a scale.
///
/// Calling it is sound if the processor has the instructions that it was compiled for.
pub(super) type DecodeChunk = unsafe fn(&[u8; CHUNK / 2], f32, &mut [f32; CHUNK]);

/// Returns the fastest function for this processor, whose instructions it has.
pub(super) fn decode_chunk() -> DecodeChunk {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            return x86::avx512;
        }
        if is_x86_feature_detected!("avx2") {
            return x86::avx2;
        }
    }
    portable
}

/// Values of the two codes in each byte.
static PAIRS: [[f32; 2]; 256] = {
    let mut pairs = [[0.0; 2]; 256];
    let mut byte = 0;
    while byte < pairs.len() {
        pairs[byte] = [NF4[byte >> 4], NF4[byte & 15]];
        byte += 1;
    }
    pairs
};

/// Implements [`DecodeChunk`] for any processor.
fn portable(codes: &[u8; CHUNK / 2], scale: f32, target: &mut [f32; CHUNK]) {
    for (byte, target) in codes.iter().zip(target.as_chunks_mut::<2>().0) {
        *target = PAIRS[usize::from(*byte)].map(|value| value * scale);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{CHUNK, NF4};

    /// Implements [`DecodeChunk`](super::DecodeChunk): 32 codes at a time.
    #[target_feature(enable = "avx512f")]
    pub(super) fn avx512(codes: &[u8; CHUNK / 2], scale: f32, target: &mut [f32; CHUNK]) {
        let scale = _mm512_set1_ps(scale);
        let evens = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        let odds = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
        // SAFETY: each load and store lies within the array that its pointer comes from: 16 values,
        // 16 bytes of codes, 32 elements.
        unsafe {
            let table = _mm512_loadu_ps(NF4.as_ptr());
            for (codes, target) in
                codes.as_chunks::<16>().0.iter().zip(target.as_chunks_mut::<32>().0)
            {
                let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(codes.as_ptr().cast()));
                // The look-up takes the lowest four bits. The first of two codes is in the upper half.
                let upper = _mm512_srli_epi32::<4>(bytes);
                let first = _mm512_mul_ps(_mm512_permutexvar_ps(upper, table), scale);
                let second = _mm512_mul_ps(_mm512_permutexvar_ps(bytes, table), scale);
                let target = target.as_mut_ptr();
                _mm512_storeu_ps(target, _mm512_permutex2var_ps(first, evens, second));
                _mm512_storeu_ps(target.add(16), _mm512_permutex2var_ps(first, odds, second));
            }
        }
    }

    /// Implements [`DecodeChunk`](super::DecodeChunk): 16 codes at a time.
    #[target_feature(enable = "avx2")]
    pub(super) fn avx2(codes: &[u8; CHUNK / 2], scale: f32, target: &mut [f32; CHUNK]) {
        let scale = _mm256_set1_ps(scale);
        // SAFETY: each load and store lies within the array that its pointer comes from: 16 values,
        // 8 bytes of codes, 16 elements.
        unsafe {
            let (negative, positive) =
                (_mm256_loadu_ps(NF4.as_ptr()), _mm256_loadu_ps(NF4.as_ptr().add(8)));
            let values = |codes: __m256i| {
                // The look-ups take the lowest three bits; the fourth selects one of them.
                let [negative, positive] =
                    [negative, positive].map(|table| _mm256_permutevar8x32_ps(table, codes));
                let fourth = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes));
                _mm256_mul_ps(_mm256_blendv_ps(negative, positive, fourth), scale)
            };
            for (codes, target) in
                codes.as_chunks::<8>().0.iter().zip(target.as_chunks_mut::<16>().0)
            {
                let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(codes.as_ptr().cast()));
                // The first of two codes is in the upper half of a byte.
                let (first, second) = (values(_mm256_srli_epi32::<4>(bytes)), values(bytes));
                let (low, high) =
                    (_mm256_unpacklo_ps(first, second), _mm256_unpackhi_ps(first, second));
                let target = target.as_mut_ptr();
                _mm256_storeu_ps(target, _mm256_permute2f128_ps::<0x20>(low, high));
                _mm256_storeu_ps(target.add(8), _mm256_permute2f128_ps::<0x31>(low, high));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_processors_have_the_same_bits() {
        let mut functions: Vec<(&str, DecodeChunk)> = vec![("portable", portable)];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") {
                functions.push(("avx2", x86::avx2));
            }
            if is_x86_feature_detected!("avx512f") {
                functions.push(("avx512", x86::avx512));
            }
        }
        for start in (0..256).step_by(CHUNK / 2) {
            let codes: [u8; CHUNK / 2] = std::array::from_fn(|at| (start + at) as u8);
            let scale = 0.37 + start as f32;
            for (name, function) in &functions {
                let mut found = [f32::NAN; CHUNK];
                // SAFETY: the processor has the instructions.
                unsafe { function(&codes, scale, &mut found) };
                for (at, found) in found.into_iter().enumerate() {
                    let byte = codes[at / 2];
                    let code = if at % 2 == 0 { byte >> 4 } else { byte & 15 };
                    let expected = NF4[usize::from(code)] * scale;
                    assert_eq!(found.to_bits(), expected.to_bits(), "{name}, {at} of {codes:?}");
                }
            }
        }
    }
}
