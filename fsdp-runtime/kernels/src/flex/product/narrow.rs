//! Products of bf16 or f16 matrices by the kernel for f32, on processors without an instruction for them.
//!
//! Blocks of the factors are converted to f32 where the kernel reads them, in the cache, and the sums of a block are
//! rounded before the next one. A converted copy of a whole factor would be written to memory and read again.

use std::cell::RefCell;

use multiversion::multiversion;

use super::parts::{Target, Threads, blocks, keeps_bits, new_in_parts, write_row};
use super::{Matrix, converted, multiply_as_it_is};
use crate::flex::float::KernelFloat;
use crate::flex::loops::convert_over;

/// Rows of a block: `gemm` uses the rows of a second factor where they are, without packing them, for up to 48.
const ROWS: usize = 48;
/// Fewest columns of a block.
const COLUMNS: usize = 128;
/// Elements between two rows of a block, so that rows share no lines of the cache.
const PAD: usize = 16;
/// Elements of a block of columns, which stay in the processor's second cache.
const BLOCK: usize = 3 << 16;
/// Largest inner size of a block.
const INNER: usize = 2048;

/// Returns whether [`new_product`] takes less time than the product of converted factors.
pub(super) fn is_faster<I>([a, b]: [Matrix<'_, I>; 2]) -> bool {
    a.rows >= ROWS && b.columns >= COLUMNS && a.columns > 0
}

/// Returns the elements of `a · b`, computed on all threads of the current pool. The bits depend on the elements and
/// the shapes.
pub(super) fn new_product<I: KernelFloat, O: KernelFloat>([a, b]: [Matrix<'_, I>; 2]) -> Vec<O> {
    assert_eq!(a.columns, b.rows, "the inner sizes of a product");
    if a.columns > INNER && size_of::<O>() < size_of::<f32>() {
        // The sums of several blocks are added before they are rounded.
        return converted(&new_product::<I, f32>([a, b]));
    }
    // SAFETY: parts have no element in common, and `multiply_part` writes all elements of its part.
    unsafe { new_in_parts(Threads::Pool, [a, b], |target, factors| multiply_part(target, factors)) }
}

/// Blocks of a thread, kept from one product to the next.
#[derive(Default)]
struct Blocks {
    rows: Vec<f32>,
    columns: Vec<f32>,
    sums: Vec<f32>,
}

thread_local! {
    static BLOCKS: RefCell<Blocks> = RefCell::default();
}

/// Writes a part of a product.
///
/// # Safety
///
/// The rows of the target, as many as `a` has, lie in memory that nothing else uses.
unsafe fn multiply_part<I: KernelFloat, O: KernelFloat>(
    target: Target<O>,
    [a, b]: [Matrix<'_, I>; 2],
) {
    // A block of few rows and columns would be added in another order.
    let rows_of_block = if keeps_bits([ROWS, b.columns.min(COLUMNS)]) { ROWS } else { 2 * ROWS };
    BLOCKS.with_borrow_mut(|of_thread| {
        let Blocks { rows: a_block, columns: b_block, sums } = of_thread;
        for (start, inner) in blocks(a.columns, INNER) {
            let (a, b) = (a.columns(start..start + inner), b.rows(start..start + inner));
            let of_block = (BLOCK / inner / 64 * 64).clamp(COLUMNS, 4 * COLUMNS);
            for (column, columns) in blocks(b.columns, of_block) {
                let b = with_rows(b.columns(column..column + columns), b_block);
                for (row, rows) in blocks(a.rows, rows_of_block) {
                    let a = widened(a.rows(row..row + rows), a_block);
                    sums.clear();
                    sums.reserve(rows * columns);
                    let of_sums = Target { start: sums.as_mut_ptr(), stride: columns };
                    // SAFETY: the vector has room for the sums of the block. The rest is as the caller promises; the
                    // first block of the inner size writes what others add to.
                    unsafe {
                        multiply_as_it_is(of_sums, false, 1.0, [a, b]);
                        sums.set_len(rows * columns);
                        write(sums, columns, target.part(row, column), start > 0);
                    }
                }
            }
        }
    });
}

/// Writes rows of `len` sums, rounded to the type of the target, or adds them.
///
/// # Safety
///
/// The rows of the target lie in memory that nothing else uses. They are initialised if `adds` is true.
#[multiversion(targets("x86_64+avx512f+avx512bw", "x86_64+avx2"), dispatcher = "direct")]
unsafe fn write<O: KernelFloat>(sums: &[f32], len: usize, target: Target<O>, adds: bool) {
    for (row, sums) in sums.chunks_exact(len).enumerate() {
        // SAFETY: as the caller promises.
        unsafe { write_row(sums, target.part(row, 0), adds) };
    }
}

/// Returns a matrix as f32, in the memory of `copy`. Elements that are neighbours in memory remain so.
fn widened<'a, I: KernelFloat>(matrix: Matrix<'_, I>, copy: &'a mut Vec<f32>) -> Matrix<'a> {
    if matrix.column_stride != 1 && matrix.row_stride == 1 {
        return with_rows(matrix.transposed(), copy).transposed();
    }
    with_rows(matrix, copy)
}

/// Returns a matrix as f32 with consecutive rows, in the memory of `copy`.
fn with_rows<'a, I: KernelFloat>(matrix: Matrix<'_, I>, copy: &'a mut Vec<f32>) -> Matrix<'a> {
    let Matrix { elements, rows, columns, row_stride, column_stride } = matrix;
    let stride = columns + PAD;
    let numel = rows * stride;
    copy.resize(copy.len().max(numel), 0.0);
    let target = &mut copy[..numel];
    if column_stride == 1 {
        for (row, target) in target.chunks_exact_mut(stride).enumerate() {
            convert_over(&elements[row * row_stride..][..columns], &mut target[..columns]);
        }
    } else {
        turn(matrix, target, stride);
    }
    Matrix::new(target, [rows, columns], stride)
}

/// Writes the rows of a matrix whose rows are not consecutive.
#[multiversion(targets("x86_64+avx512f+avx512bw", "x86_64+avx2"), dispatcher = "direct")]
fn turn<I: KernelFloat>(matrix: Matrix<'_, I>, target: &mut [f32], stride: usize) {
    const TILE: usize = 16;
    let Matrix { elements, columns, row_stride, column_stride, .. } = matrix;
    for (tile, target) in target.chunks_mut(TILE * stride).enumerate() {
        let first = tile * TILE * row_stride;
        for column in 0..columns {
            let source = &elements[first + column * column_stride..];
            match row_stride {
                1 if target.len() == TILE * stride => {
                    let source: &[I; TILE] = source.first_chunk().expect("a column of the matrix");
                    for (row, element) in source.iter().enumerate() {
                        target[row * stride + column] = element.wide();
                    }
                }
                _ => {
                    for row in 0..target.len() / stride {
                        target[row * stride + column] = source[row * row_stride].wide();
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::super::multiply_by_gemm;
    use super::super::tests::{elements, matrix, with_widened};
    use super::*;

    fn narrowed<E: KernelFloat>(len: usize) -> Vec<E> {
        elements(len).into_iter().map(E::narrow).collect()
    }

    /// Returns the product of converted factors.
    fn of_converted<I: KernelFloat>(factors: [Matrix<'_, I>; 2]) -> Vec<f32> {
        with_widened(factors, |[a, b]| {
            let mut product = vec![0f32; a.rows * b.columns];
            let target = Target { start: product.as_mut_ptr(), stride: b.columns };
            // SAFETY: the vector has room for the product.
            unsafe { multiply_by_gemm(Threads::Pool, target, false, 1.0, [a, b]) };
            product
        })
    }

    fn check<I: KernelFloat + PartialEq>(adds: bool, sizes: &[[usize; 3]]) {
        for &[rows, inner, columns] in sizes {
            let (a, b) = (narrowed::<I>(rows * inner), narrowed::<I>(inner * columns));
            for (transposed_a, transposed_b) in
                [(false, false), (false, true), (true, false), (true, true)]
            {
                let a = matrix(&a, [rows, inner], transposed_a);
                let b = matrix(&b, [inner, columns], transposed_b);
                let name = format!("{rows} x {inner} x {columns}, {transposed_a}, {transposed_b}");
                assert!(is_faster([a, b]), "{name}");
                let sums: Vec<f32> = new_product([a, b]);
                let expected = of_converted([a, b]);
                // Sums of blocks of the inner size are added to each other.
                let bound = if adds { 1e-5 * (inner as f32).sqrt() } else { 0.0 };
                for (sum, expected) in sums.iter().zip(&expected) {
                    assert!((sum - expected).abs() <= bound, "{sum}, not {expected}: {name}");
                }
                let rounded: Vec<I> = sums.iter().map(|&sum| I::narrow(sum)).collect();
                for threads in [1, 2, 3] {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                    let parts: Vec<I> = pool.expect("a pool").install(|| new_product([a, b]));
                    assert!(parts == rounded, "{name}, on {threads} threads");
                }
            }
        }
    }

    #[test]
    fn products_have_the_bits_of_converted_factors() {
        let sizes = [[48, 1, 128], [50, 70, 129], [97, 2048, 200], [500, 33, 700], [200, 512, 150]];
        check::<bf16>(false, &sizes);
        check::<f16>(false, &sizes[1..]);
    }

    #[test]
    fn blocks_of_a_long_inner_size_are_added_before_they_are_rounded() {
        check::<bf16>(true, &[[60, 4100, 130], [130, 6144, 260]]);
    }

    #[test]
    fn factors_of_any_strides_are_read_where_they_are() {
        let (a, b) = (narrowed::<f16>(3 * 64 * 50), narrowed::<f16>(2 * 50 * 150));
        let every = |elements, rows, columns, step| Matrix {
            elements,
            rows,
            columns,
            row_stride: step * columns,
            column_stride: step,
        };
        let factors = [every(&a[..], 64, 50, 3), every(&b[..], 50, 150, 2)];
        assert_eq!(new_product::<_, f32>(factors), of_converted(factors));
    }
}
