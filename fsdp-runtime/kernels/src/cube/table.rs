//! The gradient of a table whose rows were looked up, in two kernels.
//!
//! The first finds for each id the next equal one. The second has threads for the first of equal ids, which
//! add up the gradients of all of them in order, in f32, and write the row once. Other rows stay zero.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::buffer_slice::BufferSlice;
use super::copy::fill;
use super::device::rounds_in_integers;
use super::rounding::narrowed;
use super::span::{grid, row_span};
use super::tensors::{contiguous, element, empty};

/// Most ids: their indices are exact in f32.
const MOST_IDS: usize = 1 << 24;

/// Writes the index of the next equal id, or the number of ids after the last one. It is negative if an
/// equal id comes before.
#[cube(launch_unchecked)]
fn table_links_kernel(ids: &[f32], links: &mut [f32], from: usize, to: usize, count: usize) {
    if ABSOLUTE_POS < count {
        let id = ids[from + ABSOLUTE_POS];
        let mut next = count;
        let mut sign = 1.0f32;
        for other in 0..count {
            if ids[from + other] == id {
                if other < ABSOLUTE_POS {
                    sign = -1.0f32;
                }
                if other > ABSOLUTE_POS && next == count {
                    next = other;
                }
            }
        }
        links[to + ABSOLUTE_POS] = sign * f32::cast_from(next as u32);
    }
}

/// Sums up the gradients of equal ids. Lengths count vectors.
#[cube(launch_unchecked)]
fn table_sum_kernel<F: Float, N: Size>(
    grads: &[Vector<F, N>],
    ids: &[f32],
    links: &[f32],
    table: &mut [Vector<F, N>],
    grads_from: usize,
    ids_from: usize,
    links_from: usize,
    table_to: usize,
    width: usize,
    count: usize,
    rows: usize,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < count * width {
        let (first, column) = (ABSOLUTE_POS / width, ABSOLUTE_POS % width);
        let id = ids[ids_from + first];
        let row = u32::cast_from(max(id, 0.0f32)) as usize;
        if links[links_from + first] > 0.0f32 && id >= 0.0f32 && row < rows {
            let mut sum = Vector::<f32, N>::new(0.0f32);
            let mut at = first;
            while at < count {
                sum += Vector::<f32, N>::cast_from(grads[grads_from + at * width + column]);
                at = u32::cast_from(f32::abs(links[links_from + at])) as usize;
            }
            table[table_to + row * width + column] = narrowed(sum, integers);
        }
    }
}

/// Implements [`Kernels::table_gradient`](crate::Kernels::table_gradient). Ids that are no row of the table
/// have no gradient.
pub(super) fn gradient(grads: CubeTensor, ids: CubeTensor, shape: Shape) -> CubeTensor {
    let (grads, ids) = (contiguous(grads), contiguous(ids));
    let ([rows, row_len], count) = (shape.dims(), ids.shape().num_elements());
    assert_eq!(grads.shape().num_elements(), count * row_len, "a gradient for each id");
    assert!(count <= MOST_IDS, "the table takes {MOST_IDS} ids at a time, not {count}");
    let client = grads.client.clone();
    let table = empty(&grads, shape, grads.dtype);
    let links = empty(&ids, Shape::from([count]), DType::F32);
    let slices = [&grads, &table, &ids, &links].map(BufferSlice::of);
    let [of_grads, of_table, of_ids, of_links] = &slices;
    fill(&client, of_table, rows * row_len, 0.0);
    if count * row_len == 0 {
        return table;
    }
    let (cubes, dim) = grid(&client, count);
    // SAFETY: both buffers have `count` elements from their start on, which the kernel stays within.
    unsafe {
        table_links_kernel::launch_unchecked(
            &client,
            cubes,
            dim,
            of_ids.buffer_arg(),
            of_links.buffer_arg(),
            of_ids.start,
            of_links.start,
            count,
        );
    }
    let numel = count.min(rows) * row_len;
    let span = row_span(&client, &[of_grads, of_table], &[], numel, row_len);
    let width = row_len / span.width;
    let (cubes, dim) = grid(&client, count * width);
    let [(read, grads_from), (write, table_to)] =
        [of_grads, of_table].map(|slice| span.argument(slice));
    // SAFETY: the first assertion checked the gradients, `empty` has allocated the table and the links; the
    // kernel writes rows of the table only, and follows links, which are below `count`.
    unsafe {
        table_sum_kernel::launch_unchecked(
            &client,
            cubes,
            dim,
            span.width,
            read,
            of_ids.buffer_arg(),
            of_links.buffer_arg(),
            write,
            grads_from,
            of_ids.start,
            of_links.start,
            table_to,
            width,
            count,
            rows,
            rounds_in_integers(&client, table.dtype),
            element(table.dtype),
        );
    }
    table
}
