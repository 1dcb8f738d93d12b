//! Rotary position encoding in one kernel. Computed in f32.
//!
//! The input is read through its strides, so that heads that are views of `[batch, length, heads,
//! width]` need no copy. The result lies in memory in the same order.

use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::buffer_slice::BufferSlice;
use super::device::rounds_in_integers;
use super::rounding::narrowed;
use super::span::{Span, grid, row_span};
use super::tensors::{contiguous, element, empty_heads};
use crate::rotary::{RotaryRule, RotaryTensors};

/// Shape of the rows of a launch. Lengths and strides count vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct HeadRows {
    /// Number of pairs of vectors in all rows.
    pairs: usize,
    /// Number of pairs of vectors of a row.
    half: usize,
    /// Number of heads of a batch element.
    heads: usize,
    /// Number of rows of a head.
    length: usize,
    /// Vectors from one batch element of the input to the next.
    batch_stride: usize,
    /// Vectors from one head of the input to the next.
    head_stride: usize,
    /// Vectors from one row of the input to the next.
    row_stride: usize,
    /// Vectors from one batch element of the target to the next.
    target_batch_stride: usize,
    /// Vectors from one head of the target to the next.
    target_head_stride: usize,
    /// Vectors from one row of the target to the next.
    target_row_stride: usize,
    /// Position of a head's first row, if there is no tensor of positions.
    start: usize,
    /// Number of positions in the table.
    known: usize,
    /// Factor of the sines.
    sign: f32,
    /// Cosine and sine of a position that is not in the table: NaN, which WGSL has no literal for.
    unknown: f32,
}

/// Rotates pairs of vectors: neighbours if `interleaved`, which are single elements then, and otherwise
/// one of each half of a row. `positions` has one tensor or none.
#[cube(launch_unchecked)]
fn rotate_kernel<F: Float, N: Size>(
    source: &[Vector<F, N>],
    table: &[Vector<f32, N>],
    positions: &Sequence<Box<[f32]>>,
    target: &mut [Vector<F, N>],
    from: usize,
    table_from: usize,
    position_firsts: &Sequence<usize>,
    to: usize,
    shape: HeadRows,
    #[comptime] interleaved: bool,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < shape.pairs {
        let (row, pair) = (ABSOLUTE_POS / shape.half, ABSOLUTE_POS % shape.half);
        let (head, at) = (row / shape.length, row % shape.length);
        let batch = head / shape.heads;
        let mut position = shape.start + at;
        #[unroll]
        for part in 0..positions.len() {
            let index = position_firsts[part] + batch * shape.length + at;
            let number = positions[part][index];
            let counted = u32::cast_from(max(number, 0.0f32)) as usize;
            position = select(number >= 0.0f32, counted, shape.known);
        }
        let angles = table_from + min(position, shape.known - 1) * 2 * shape.half + pair;
        let sign = Vector::<f32, N>::new(shape.sign);
        let mut cos = table[angles];
        let mut sin = table[angles + shape.half] * sign;
        if position >= shape.known {
            cos = Vector::new(shape.unknown);
            sin = Vector::new(shape.unknown);
        }

        let mut left = pair;
        let mut right = pair + shape.half;
        if comptime!(interleaved) {
            left = 2 * pair;
            right = left + 1;
        }
        let first = from
            + batch * shape.batch_stride
            + head % shape.heads * shape.head_stride
            + at * shape.row_stride;
        let a = Vector::<f32, N>::cast_from(source[first + left]);
        let b = Vector::<f32, N>::cast_from(source[first + right]);
        let written = to
            + batch * shape.target_batch_stride
            + head % shape.heads * shape.target_head_stride
            + at * shape.target_row_stride;
        target[written + left] = narrowed(a * cos - b * sin, integers);
        target[written + right] = narrowed(b * cos + a * sin, integers);
    }
}

/// Returns the tensor if the elements of a row are neighbours, else a contiguous copy. Also returns the
/// numbers of elements from one batch element, head and row to the next.
fn with_whole_rows(tensor: CubeTensor) -> (CubeTensor, [usize; 3]) {
    let strides = |tensor: &CubeTensor| match tensor.meta.strides()[..] {
        [batch, head, row, 1] => Some([batch, head, row]),
        _ => None,
    };
    if let Some(strides) = strides(&tensor) {
        return (tensor, strides);
    }
    let tensor = contiguous(tensor);
    let [_, heads, length, width]: [usize; 4] = tensor.shape().dims();
    (tensor, [heads * length * width, length * width, width])
}

/// Returns the greatest number that divides both.
fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// Returns the vectors of the rows as one span. Their width divides half a row and all strides. Pairs that
/// are interleaved have single elements.
fn span_of(
    target: &CubeTensor,
    slices: &[BufferSlice; 3],
    strides: [usize; 3],
    rule: &RotaryRule,
) -> Span {
    let half = target.shape()[3] / 2;
    let block = strides.into_iter().fold(half, common_divisor);
    let block = if rule.interleaved { 1 } else { block };
    let [source, table, write] = slices;
    let numel = target.shape().num_elements();
    row_span(&target.client, &[write], &[source, table], numel, block)
}

/// Implements [`Kernels::rotate`](crate::Kernels::rotate).
///
/// # Panics
///
/// If, without a tensor of positions, the last position is beyond the table.
pub(super) fn rotate(tensors: RotaryTensors<CubeTensor>, rule: &RotaryRule) -> CubeTensor {
    let (tensor, strides) = with_whole_rows(tensors.input);
    let (table, positions) = (contiguous(tensors.table), tensors.positions.map(contiguous));
    let shape: [usize; 4] = tensor.shape().dims();
    let [batch, heads, length, width] = shape;
    let known = table.shape()[0];
    assert!(
        positions.is_some() || rule.start + length <= known,
        "position {} is beyond the rotary encoding, which has {known}",
        rule.start + length - 1
    );
    let of_positions = positions.as_ref().map_or(batch * length, |it| it.shape().num_elements());
    assert_eq!(of_positions, batch * length, "a position for each row of a batch element");
    let target = empty_heads(&tensor, shape, tensor.dtype);
    let (target, target_strides) = with_whole_rows(target);
    let client = tensor.client.clone();
    let slices = [&tensor, &table, &target].map(BufferSlice::of);
    let last: usize = strides.iter().zip(shape).map(|(stride, size)| stride * (size - 1)).sum();
    assert!(last + width <= slices[0].len(), "a kernel must stay within its buffers");
    let span = span_of(&target, &slices, strides, rule);
    let half = width / 2 / span.width;
    let pairs = batch * heads * length * half;
    let (count, dim) = grid(&client, pairs);
    let [(read, from), (angles, table_from), (write, to)] =
        slices.each_ref().map(|slice| span.argument(slice));
    let [batch_stride, head_stride, row_stride] = strides.map(|stride| stride / span.width);
    let target_strides = target_strides.map(|stride| stride / span.width);
    let positions = positions.as_ref().map(BufferSlice::of);
    let position_firsts = positions.iter().map(|slice| slice.start).collect();
    let positions = positions.iter().map(BufferSlice::buffer_arg).collect();
    let sign = if rule.inverse { -1.0 } else { 1.0 };
    // SAFETY: the assertions above and `row_span` checked that the buffers hold the rows, the positions and
    // the table; the kernel accesses only these, as it reads the last angles for positions beyond.
    unsafe {
        rotate_kernel::launch_unchecked(
            &client,
            count,
            dim,
            span.width,
            read,
            angles,
            positions,
            write,
            from,
            table_from,
            position_firsts,
            to,
            HeadRowsLaunch::new(
                pairs,
                half,
                heads,
                length,
                batch_stride,
                head_stride,
                row_stride,
                target_strides[0],
                target_strides[1],
                target_strides[2],
                rule.start,
                known,
                sign,
                f32::NAN,
            ),
            rule.interleaved,
            rounds_in_integers(&client, tensor.dtype),
            element(tensor.dtype),
        );
    }
    target
}
