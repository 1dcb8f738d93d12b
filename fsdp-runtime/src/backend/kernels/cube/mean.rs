//! Mean of the gradients of N ranks: added in f32 in the given order, then divided.

use std::ops::Range;

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::buffer_slice::BufferSlice;
use super::span::spans;
use super::tensors::{contiguous, element, empty};
use super::tile::{Tile, begin, end, own_tile};

/// Largest number of parts that one launch adds. The next launch adds further parts to its sums.
const MAX_PARTS: usize = 8;

/// Adds `count` vectors of all parts; if `join`, to the sums in `target`. If `divide`, divides the
/// result.
#[cube(launch_unchecked)]
fn mean_kernel<I: Float, N: Size>(
    parts: &Sequence<Box<[Vector<I, N>]>>,
    target: &mut [Vector<f32, N>],
    firsts: &Sequence<usize>,
    to: usize,
    count: usize,
    divisor: f32,
    #[comptime] join: bool,
    #[comptime] divide: bool,
    #[comptime] tile: Tile,
    #[define(I)] _dtype: ElemType,
) {
    let at = own_tile(tile);
    let end = end(at, count, tile);
    let mut index = begin(at, tile);
    while index < end {
        let mut sum = Vector::<f32, N>::cast_from(parts[0][firsts[0] + index]);
        if comptime!(join) {
            sum = target[to + index] + sum;
        }
        #[unroll]
        for part in 1..parts.len() {
            sum += Vector::cast_from(parts[part][firsts[part] + index]);
        }
        if comptime!(divide) {
            sum /= Vector::new(divisor);
        }
        target[to + index] = sum;
        index += comptime!(tile.lanes);
    }
}

/// Implements [`Kernels::rank_mean`](crate::backend::kernels::Kernels::rank_mean).
pub(super) fn mean(
    parts: &[CubeTensor],
    range: Range<usize>,
    divisor: usize,
    shape: Shape,
) -> CubeTensor {
    let parts: Vec<_> = parts.iter().cloned().map(contiguous).collect();
    let (client, device) = (parts[0].client.clone(), &parts[0].device);
    let target = empty(device, shape, DType::F32);
    let sums = BufferSlice::of(&target);
    assert_eq!(
        range.len(),
        target.shape().num_elements(),
        "the shape of a mean has as many elements as its range"
    );
    let dtype = parts[0].dtype;
    let tile = Tile::new(&client);
    let groups = parts.chunks(MAX_PARTS);
    let last = groups.len() - 1;
    for (index, group) in groups.enumerate() {
        let slices: Vec<_> =
            group.iter().map(|part| BufferSlice::of(part).skip(range.start)).collect();
        assert!(
            slices.iter().all(|slice| slice.dtype == dtype),
            "the parts of a mean have one dtype"
        );
        let all: Vec<_> = slices.iter().chain([&sums]).collect();
        for span in spans(&client, &all, range.len()) {
            let (count, dim) = tile.grid(&client, span.count);
            let (read, firsts): (Vec<_>, Vec<_>) =
                slices.iter().map(|slice| span.argument(slice)).unzip();
            let (write, to) = span.argument(&sums);
            // SAFETY: `spans` checked that every buffer holds the elements; the kernel accesses
            // only the span's vectors.
            unsafe {
                mean_kernel::launch_unchecked(
                    &client,
                    count,
                    dim,
                    span.width,
                    read.into_iter().collect(),
                    write,
                    firsts.into_iter().collect(),
                    to,
                    span.count,
                    divisor as f32,
                    index > 0,
                    index == last && divisor > 1,
                    tile,
                    element(dtype),
                );
            }
        }
    }
    target
}
