//! Dropout: Philox4x32-7 in integers, the same bits as on Flex.

use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::batch::{Tile, begin, end, own_tile};
use super::{Run, contiguous, element, empty, in_integers, narrowed, spans_within};
use crate::backend::kernels::MaskSource;
use crate::backend::kernels::mask::{BATCH, LOW_BYTES, SIGN};
use crate::backend::philox::{LANES, MULTIPLIERS, ROUNDS, WEYL};

/// Each of `units` draws `N` neighbouring blocks of a batch: eight times two neighbouring vectors of
/// elements, `2 · LANES` apart.
/// Of the elements those from `start` on are in the span, `count` vectors of them.
#[cube(launch_unchecked)]
fn dropout_kernel<F: Float, N: Size>(
    source: &[Vector<F, N>],
    target: &mut [Vector<F, N>],
    from: usize,
    to: usize,
    start: usize,
    count: usize,
    units: usize,
    key_0: u32,
    key_1: u32,
    place_0: u32,
    place_1: u32,
    threshold: u32,
    keep: f32,
    #[comptime] integers: bool,
    #[comptime] tile: Tile,
    #[define(F)] _dtype: ElemType,
) {
    let at = own_tile(tile);
    let end = end(at, units, tile);
    let mut unit = begin(at, tile);
    while unit < end {
        let width = N::value();
        let groups = comptime!(LANES / width);
        let batch = start / comptime!(BATCH) + unit / groups;
        let group = unit % groups;

        let mut iota = Vector::<u32, N>::empty();
        #[unroll]
        for lane in 0..width {
            iota.insert(lane, comptime!(lane as u32));
        }
        // Blocks are numbered in 64 bits; fewer than 2^32 are drawn, so the high half is 0.
        let first = batch as u32 * comptime!(LANES as u32) + group as u32 * comptime!(width as u32);
        let mut a = iota + Vector::new(first);
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

        // The first element of each two vectors. One before the span wraps, beyond its end.
        let at = batch * comptime!(BATCH) + 2 * group * width - start;
        let mut words = Sequence::<Vector<u32, N>>::new();
        words.push(a);
        words.push(b);
        words.push(c);
        words.push(d);
        #[unroll]
        for word in 0..4usize {
            let upper = words[word];
            let lower = words[comptime!((word + 1) % 4)] ^ words[comptime!((word + 2) % 4)];
            let low = Vector::new(LOW_BYTES);
            let high = Vector::new(comptime!(!LOW_BYTES));
            let eight = Vector::new(8u32);
            let mut pairs = Sequence::<Vector<u32, N>>::new();
            pairs.push((upper & high) | (lower & low));
            pairs.push(((upper & low) << eight) | ((lower & high) >> eight));
            #[unroll]
            for half in 0..2usize {
                let pair = pairs[half];
                let first = pair & Vector::new(0xFFFFu32);
                let second = pair >> Vector::new(16u32);
                let at = at + comptime!((word * 2 + half) * 2 * LANES);
                #[unroll]
                for vector in 0..2usize {
                    let at = (at + vector * width) / width;
                    if at < count {
                        // First and second elements of the pairs in turns.
                        let mut draws = Vector::<u32, N>::empty();
                        #[unroll]
                        for lane in 0..width {
                            let element = comptime!(vector * width + lane);
                            let draw = if comptime!(element.is_multiple_of(2)) {
                                first.extract(comptime!(element / 2))
                            } else {
                                second.extract(comptime!(element / 2))
                            };
                            draws.insert(lane, draw);
                        }
                        let element = source[from + at];
                        target[to + at] = dropped(element, keep, draws, threshold, integers);
                    }
                }
            }
        }
        unit += comptime!(tile.lanes);
    }
}

/// 0 where the bits drawn, their uppermost turned over, are below the threshold, else the element
/// times `keep`.
#[cube]
fn dropped<F: Float, N: Size>(
    element: Vector<F, N>,
    keep: f32,
    draws: Vector<u32, N>,
    threshold: u32,
    #[comptime] integers: bool,
) -> Vector<F, N> {
    let wide = Vector::<f32, N>::cast_from(element) * Vector::new(keep);
    let zero = Vector::<f32, N>::new(0.0f32);
    let draws = draws ^ Vector::new(SIGN);
    let drop = draws.less_than(&Vector::<u32, N>::new(threshold));
    narrowed(select_many(drop, zero, wide), integers)
}

/// The tensor's elements times those of a mask.
///
/// # Panics
///
/// For 2^32 elements and more, which indices on a device do not count.
pub(crate) fn dropout(tensor: CubeTensor, mask: &MaskSource) -> CubeTensor {
    let tensor = contiguous(tensor);
    let target = empty(&tensor.device, tensor.shape(), tensor.dtype);
    let (client, dtype) = (tensor.client.clone(), element(tensor.dtype));
    let numel = tensor.shape().num_elements();
    assert!(numel < 1 << 32, "dropout takes fewer than 2^32 elements, not {numel}");
    let tile = Tile::new(&client);
    let runs = [&Run::of(&tensor), &Run::of(&target)];
    for span in spans_within(&client, &runs, numel, LANES) {
        let batches = (span.start + span.count * span.width).div_ceil(BATCH) - span.start / BATCH;
        let units = batches * LANES / span.width;
        let (count, dim) = tile.grid(&client, units);
        let (read, from) = span.argument(runs[0]);
        let (write, to) = span.argument(runs[1]);
        // SAFETY: `spans_within` has checked that both buffers hold the elements; the kernel touches
        // `count` vectors of each.
        unsafe {
            dropout_kernel::launch_unchecked(
                &client,
                count,
                dim,
                span.width,
                read,
                write,
                from,
                to,
                span.start,
                span.count,
                units,
                mask.key[0],
                mask.key[1],
                mask.place[0],
                mask.place[1],
                u32::from(mask.threshold()),
                mask.keep_in(tensor.dtype),
                in_integers(&client, tensor.dtype),
                tile,
                dtype,
            );
        }
    }
    target
}
