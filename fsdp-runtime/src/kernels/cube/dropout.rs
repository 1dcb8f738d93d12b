//! Dropout masks: Philox4x32-10 in integers, the same bits as on Flex.

use burn::tensor::{DType, Shape};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::{element, grid};
use crate::kernels::MaskSource;
use crate::nn::philox::{LANES, MULTIPLIERS, ROUNDS, WEYL};

/// Elements drawn from `LANES` blocks, as on Flex: word by word, low halves before high ones.
const BATCH: usize = LANES * 8;

/// A unit draws `N` neighbouring blocks of a batch: eight vectors of elements, `LANES` apart.
#[cube(launch_unchecked)]
fn mask_kernel<F: Float, N: Size>(
    mask: &mut [Vector<F, N>],
    units: usize,
    key_0: u32,
    key_1: u32,
    place_0: u32,
    place_1: u32,
    threshold: u32,
    keep: InputScalar,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < units {
        let width = N::value();
        let groups = comptime!(LANES / width);
        let batch = ABSOLUTE_POS / groups;
        let group = ABSOLUTE_POS % groups;

        let mut lanes = Vector::<u32, N>::empty();
        #[unroll]
        for lane in 0..width {
            lanes.insert(lane, comptime!(lane as u32));
        }
        // Blocks are numbered in 64 bits; fewer than 2^32 are drawn, so the high half is 0.
        let first = batch as u32 * comptime!(LANES as u32) + group as u32 * comptime!(width as u32);
        let mut a = lanes + Vector::new(first);
        let mut b = Vector::<u32, N>::new(0u32);
        let mut c = Vector::<u32, N>::new(place_0);
        let mut d = Vector::<u32, N>::new(place_1);
        let mut key_a = key_0;
        let mut key_b = key_1;
        #[unroll]
        for _ in 0..ROUNDS {
            let high_p = a.mul_hi(Vector::new(MULTIPLIERS[0]));
            let low_p = a * Vector::new(MULTIPLIERS[0]);
            let high_q = c.mul_hi(Vector::new(MULTIPLIERS[1]));
            let low_q = c * Vector::new(MULTIPLIERS[1]);
            a = high_q ^ b ^ Vector::new(key_a);
            b = low_q;
            c = high_p ^ d ^ Vector::new(key_b);
            d = low_p;
            key_a += WEYL[0];
            key_b += WEYL[1];
        }

        let to = batch * comptime!(BATCH / width) + group;
        let keep = Vector::<F, N>::new(keep.get::<F>());
        write::<F, N>(mask, to, a, threshold, keep);
        write::<F, N>(mask, to + comptime!(2 * groups), b, threshold, keep);
        write::<F, N>(mask, to + comptime!(4 * groups), c, threshold, keep);
        write::<F, N>(mask, to + comptime!(6 * groups), d, threshold, keep);
    }
}

/// The elements of one word: its low half, and `LANES` elements on its high half.
#[cube]
fn write<F: Float, N: Size>(
    mask: &mut [Vector<F, N>],
    to: usize,
    word: Vector<u32, N>,
    threshold: u32,
    keep: Vector<F, N>,
) {
    let zero = Vector::<F, N>::new(F::from_int(0));
    let threshold = Vector::<u32, N>::new(threshold);
    let low = word & Vector::new(0xFFFFu32);
    let high = word >> Vector::new(16u32);
    mask[to] = select_many(low.less_than(&threshold), zero, keep);
    let width = N::value();
    mask[to + comptime!(LANES / width)] = select_many(high.less_than(&threshold), zero, keep);
}

/// A mask of the given shape.
///
/// # Panics
///
/// For 2^34 elements and more.
pub(crate) fn mask(
    device: &CubeDevice,
    source: &MaskSource,
    shape: Shape,
    dtype: DType,
) -> CubeTensor {
    let client = device.client();
    let numel = shape.num_elements();
    // Whole batches, so that a unit writes whole vectors; the tensor ends where its shape does.
    let batches = numel.div_ceil(BATCH).max(1);
    assert!(batches <= u32::MAX as usize / LANES, "a dropout mask has fewer than 2^34 elements");
    let handle = client.empty(batches * BATCH * dtype.size());
    let sizes = client.io_optimized_vector_sizes(dtype.size());
    let width = sizes.into_iter().find(|&width| width <= LANES).unwrap_or(1);
    let units = batches * LANES / width;
    let (count, dim) = grid(&client, units);
    // SAFETY: the buffer holds the elements that `units` units write.
    unsafe {
        mask_kernel::launch_unchecked(
            &client,
            count,
            dim,
            width,
            BufferArg::from_raw_parts(handle.clone(), batches * BATCH),
            units,
            source.key[0],
            source.key[1],
            source.place[0],
            source.place[1],
            source.threshold(),
            InputScalar::new(source.keep(), element(dtype)),
            element(dtype),
        );
    }
    let beyond = handle.size_in_used() - (numel * dtype.size()) as u64;
    let handle = if beyond > 0 { handle.offset_end(beyond) } else { handle };
    CubeTensor::new_contiguous(client, device.clone(), shape, handle, dtype)
}
