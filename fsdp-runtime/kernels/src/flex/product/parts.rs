//! The division of a product into parts and blocks, and the memory that they write.

use std::ops::Range;

use rayon::prelude::*;

use super::Matrix;
use crate::flex::float::KernelFloat;
use crate::flex::new_tensor::Uninit;

/// Threads that compute a product. The bits are the same.
#[derive(Clone, Copy)]
pub(in crate::flex) enum Threads {
    /// The calling thread, for products too small for AMX: packing their factors takes most of the time.
    One,
    /// All threads of the current pool.
    Pool,
}

/// Calls `f` with each part of a product: its first row and column, and its factors. The parts have no element in
/// common.
pub(super) fn for_each_part<'a, E: Copy + Sync>(
    threads: Threads,
    [a, b]: [Matrix<'a, E>; 2],
    f: impl Fn([usize; 2], [Matrix<'a, E>; 2]) + Sync,
) {
    let [part_rows, part_columns] = match threads {
        Threads::Pool if a.rows * b.columns > 0 => {
            part_shape(rayon::current_num_threads(), [a.rows, a.columns, b.columns])
        }
        _ => [a.rows, b.columns],
    };
    if [part_rows, part_columns] == [a.rows, b.columns] {
        f([0, 0], [a, b]);
        return;
    }
    let row_starts = (0..a.rows).step_by(part_rows);
    let starts = |row| (0..b.columns).step_by(part_columns).map(move |column| [row, column]);
    let parts: Vec<[usize; 2]> = row_starts.flat_map(starts).collect();
    parts.into_par_iter().for_each(|[row, column]| {
        let a = a.rows(row..(row + part_rows).min(a.rows));
        let columns = column..(column + part_columns).min(b.columns);
        f([row, column], [a, b.columns(columns)]);
    });
}

/// Returns the elements of a product, given a function that writes a part of it.
///
/// # Safety
///
/// The function writes all elements of its part, as many rows and columns from the target on as its factors have.
pub(super) unsafe fn new_in_parts<'a, I: Copy + Sync, O>(
    threads: Threads,
    [a, b]: [Matrix<'a, I>; 2],
    write: impl Fn(Target<O>, [Matrix<'a, I>; 2]) + Sync,
) -> Vec<O> {
    let numel = a.rows * b.columns;
    let mut product = Vec::with_capacity(numel);
    let target = Target { start: product.as_mut_ptr(), stride: b.columns };
    for_each_part(threads, [a, b], |[row, column], factors| {
        write(target.part(row, column), factors);
    });
    // SAFETY: the vector has room for the product. The parts cover it, and each has been written.
    unsafe { product.set_len(numel) };
    product
}

/// Rows of a product in memory.
pub(super) struct Target<E = f32> {
    pub(super) start: *mut E,
    /// Elements from one row to the next.
    pub(super) stride: usize,
}

// SAFETY: the functions that write to a target say which elements nothing else may use.
unsafe impl<E> Send for Target<E> {}
// SAFETY: as above.
unsafe impl<E> Sync for Target<E> {}

impl<E> Clone for Target<E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for Target<E> {}

impl<E> Target<E> {
    /// Returns the target from an element on.
    pub(super) fn part(self, row: usize, column: usize) -> Self {
        Self { start: self.start.wrapping_add(row * self.stride + column), ..self }
    }
}

/// Writes sums to a row of a target, rounded to its type, or adds them.
///
/// # Safety
///
/// The row lies in memory that nothing else uses. It is initialised if `adds` is true.
#[inline(always)]
pub(super) unsafe fn write_row<E: KernelFloat>(sums: &[f32], target: Target<E>, adds: bool) {
    // SAFETY: as the caller promises.
    let target: &mut Uninit<E> =
        unsafe { std::slice::from_raw_parts_mut(target.start.cast(), sums.len()) };
    for (target, &sum) in target.iter_mut().zip(sums) {
        // SAFETY: as the caller promises.
        let before = if adds { unsafe { target.assume_init() }.wide() } else { 0.0 };
        target.write(E::narrow(if adds { before + sum } else { sum }));
    }
}

/// Multiplications of a part of a product that pay for a task of the thread pool.
const PART: usize = 1 << 21;

/// Multiplications that take as long as it takes to pack an element of a factor for the kernel.
const PACKING: usize = 44;

/// Returns the numbers of rows and columns of the parts that as many threads compute.
///
/// Each thread packs the rows of `a` and the columns of `b` of its part. The crate `gemm` can use threads
/// too: they wait for each other many times in one product, and the speed on two threads is 0.6 to 0.9 of
/// that of two parts.
pub(super) fn part_shape(threads: usize, [rows, inner, columns]: [usize; 3]) -> [usize; 2] {
    let parts = threads.min(rows * inner * columns / PART).max(1);
    let shape = |of_rows: usize| {
        let part = |size: usize, parts: usize, step: usize| {
            size.div_ceil(parts).next_multiple_of(step).min(size)
        };
        // The kernels of `gemm` compute 6 rows and up to 64 columns at once.
        [part(rows, of_rows, 6), part(columns, parts / of_rows, 64)]
    };
    let cost = |[rows, columns]: &[usize; 2]| rows * columns + PACKING * (rows + columns);
    let shapes = (1..=parts).map(shape);
    let kept = shapes.filter(|&[part_rows, part_columns]| {
        keeps_bits([last(rows, part_rows), last(columns, part_columns)])
    });
    kept.min_by_key(cost).unwrap_or([rows, columns])
}

/// Returns the size of the last part.
fn last(size: usize, part: usize) -> usize {
    size - (size - 1) / part * part
}

/// Returns whether a part of this shape adds the terms of an element in the order in which a larger product
/// adds them. The crate `gemm` has other orders for vectors, for up to 256 elements, and for up to 64 rows
/// and columns.
pub(super) fn keeps_bits([rows, columns]: [usize; 2]) -> bool {
    rows > 1 && columns > 1 && rows * columns > 256 && (rows > 64 || columns > 64)
}

/// Returns the ranges of at most `size` of `count` rows or columns.
pub(super) fn ranges(count: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).step_by(size).map(move |start| start..(start + size).min(count))
}

/// Returns the start and the length of each block of `count` rows or columns. The last block has those that are left
/// over as well, so that no block is so small that `gemm` adds the terms of an element in another order.
pub(super) fn blocks(count: usize, size: usize) -> impl Iterator<Item = (usize, usize)> {
    let blocks = (count / size).max(1);
    (0..blocks).map(move |at| {
        let end = if at + 1 == blocks { count } else { (at + 1) * size };
        (at * size, end - at * size)
    })
}
