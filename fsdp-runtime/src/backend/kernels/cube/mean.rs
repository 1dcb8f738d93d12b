//! The mean of N parts: added in f32 in the order given, divided, rounded once.

use std::ops::Range;

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::batch::{Tile, begin, end, own_tile};
use super::{Run, contiguous, element, empty, spans};

/// Parts that a launch adds, at most; the next launch goes on from its sums.
const TOGETHER: usize = 8;

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

/// The mean over `parts` of `range` of each flattened part, in f32: the sum in their order, divided
/// by `divisor`. All parts have one dtype.
pub(crate) fn mean(
    parts: &[CubeTensor],
    range: Range<usize>,
    divisor: usize,
    shape: Shape,
) -> CubeTensor {
    let parts: Vec<_> = parts.iter().cloned().map(contiguous).collect();
    let (client, device) = (parts[0].client.clone(), &parts[0].device);
    let target = empty(device, shape, DType::F32);
    let sums = Run::of(&target);
    assert_eq!(range.len(), target.shape().num_elements(), "a mean has the shape of its range");
    let dtype = parts[0].dtype;
    let tile = Tile::new(&client);
    let groups = parts.chunks(TOGETHER);
    let last = groups.len() - 1;
    for (index, group) in groups.enumerate() {
        let runs: Vec<_> = group.iter().map(|part| Run::of(part).from(range.start)).collect();
        assert!(runs.iter().all(|run| run.dtype == dtype), "the parts of a mean have one dtype");
        let all: Vec<_> = runs.iter().chain([&sums]).collect();
        for span in spans(&client, &all, range.len()) {
            let (count, dim) = tile.grid(&client, span.count);
            let (read, firsts): (Vec<_>, Vec<_>) =
                runs.iter().map(|run| span.argument(run)).unzip();
            let (write, to) = span.argument(&sums);
            // SAFETY: `spans` has checked that every buffer holds the elements, of which the kernel
            // touches `count` vectors.
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
