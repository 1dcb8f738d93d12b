//! Dropout: a batch of elements is drawn, zeroed and scaled before the next.

use multiversion::multiversion;

use super::number::{Number, Room};
use crate::kernels::MaskSource;
use crate::kernels::mask::{BATCH, draws};
use crate::nn::philox::{LANES, blocks};

/// The elements times those of the mask from element `at` on, a multiple of [`BATCH`].
pub(super) fn dropout<'a, E: Number>(
    source: &[E],
    target: &'a mut Room<E>,
    mask: &MaskSource,
    at: usize,
) -> &'a mut [E] {
    // As a mask of this type would have it.
    let keep = E::narrow(mask.keep()).wide();
    let first = (at / BATCH * LANES) as u64;
    multiply(source, target, (mask.key, mask.place), first, mask.threshold(), keep)
}

#[multiversion(
    targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"),
    dispatcher = "direct"
)]
fn multiply<'a, E: Number>(
    source: &[E],
    target: &'a mut Room<E>,
    (key, place): ([u32; 2], [u32; 2]),
    first: u64,
    threshold: u16,
    keep: f32,
) -> &'a mut [E] {
    assert_eq!(source.len(), target.len());
    let mut first = first;
    for (source, target) in source.chunks(BATCH).zip(target.chunks_mut(BATCH)) {
        let draws = draws(blocks(key, first, place));
        for (at, (target, source)) in target.iter_mut().zip(source).enumerate() {
            let scaled = E::narrow(source.wide() * keep);
            target.write(if draws[at] < threshold { E::zeroed() } else { scaled });
        }
        first += LANES as u64;
    }
    // SAFETY: each element has been written.
    unsafe { target.assume_init_mut() }
}
