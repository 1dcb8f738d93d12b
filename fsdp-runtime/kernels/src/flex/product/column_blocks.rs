//! Products in blocks of columns of the second factor, where that saves time.
//!
//! The rows of a second factor may not be consecutive in memory: above all, those of transposed weights, and of the
//! keys and values of attention. `gemm` transposes such a factor while it packs it for its kernels. Columns that begin
//! a multiple of 1 or 2 KiB apart share few lines of the processor's cache: packing an element then takes as long as 50
//! to 150 multiplications. A copy with consecutive rows takes half of that time or less. The sizes of language models
//! are often such multiples.
//!
//! The columns of the first factor may be consecutive, as in the gradient of a weight. The kernels for AVX-512 use such
//! a factor where it is if the second factor has few columns. For more columns `gemm` packs it.

use std::cell::RefCell;

use fast_transpose::{FlipMode, FlopMode, transpose_plane_f32};

use super::Matrix;
use super::parts::{blocks, keeps_bits};

/// Multiplications that take as long as copying an element to a matrix with consecutive rows.
const COPY: usize = 25;

/// Columns of a block: as many as the kernels of `gemm` for AVX-512 compute at once, so that a block is packed and
/// multiplied while it is in the cache.
const COLUMNS: usize = 64;

/// Columns of a second factor up to which `gemm` uses the first one where it is, whatever its strides, with its kernels
/// for AVX-512.
const UNPACKED: usize = 2 * COLUMNS;

/// Returns whether `gemm` uses its kernels for AVX-512.
fn has_wide_kernels() -> bool {
    #[cfg(all(target_arch = "x86_64", feature = "x86-v4"))]
    return is_x86_feature_detected!("avx512f");
    #[cfg(not(all(target_arch = "x86_64", feature = "x86-v4")))]
    false
}

thread_local! {
    /// A block of a thread, kept from one product to the next.
    static BLOCK: RefCell<Vec<f32>> = RefCell::default();
}

/// Returns the multiplications that take as long as making the rows of a second factor consecutive.
pub(super) fn transposition(b: Matrix<'_>) -> usize {
    if b.column_stride == 1 {
        return 0;
    }
    let of_element = if is_copied_first(b) { COPY } else { packing(b) };
    of_element * b.rows * b.columns
}

/// Returns the multiplications that take as long as it takes `gemm` to pack an element of rows that are not
/// consecutive.
fn packing(b: Matrix<'_>) -> usize {
    match b.column_stride * size_of::<f32>() {
        bytes if bytes.is_multiple_of(4096) => 150,
        bytes if bytes.is_multiple_of(2048) => 100,
        // The kernels for AVX2 read fewer columns at once.
        bytes if bytes.is_multiple_of(1024) && has_wide_kernels() => 50,
        _ => 30,
    }
}

/// Returns whether a copy of the factor with consecutive rows saves time.
fn is_copied_first(b: Matrix<'_>) -> bool {
    let are_columns = b.row_stride == 1 && b.column_stride >= b.rows;
    are_columns && b.columns > 1 && packing(b) >= 2 * COPY
}

/// Calls `f` with each block of columns of the second factor of `a · b`, and the first column of the block. The rows of
/// a block are consecutive where copies save time. The factor is one block, where it is, if blocks save none.
pub(super) fn for_each_block(a: Matrix<'_>, b: Matrix<'_>, mut f: impl FnMut(usize, Matrix<'_>)) {
    if is_copied_first(b) {
        let columns = if keeps_bits([a.rows, COLUMNS]) { COLUMNS } else { 2 * COLUMNS };
        BLOCK.with_borrow_mut(|copy| {
            for (first, count) in blocks(b.columns, columns) {
                f(first, consecutive_rows(b.columns(first..first + count), copy));
            }
        });
    } else if a.column_stride != 1 && b.column_stride == 1 && has_wide_kernels() {
        // Gradients of weights: `gemm` packs such a first factor, unless the second has few columns.
        for (first, count) in blocks(b.columns, UNPACKED) {
            f(first, b.columns(first..first + count));
        }
    } else {
        f(0, b);
    }
}

/// Returns the matrix with consecutive rows, in the memory of `copy`, which grows as needed.
///
/// # Panics
///
/// If the elements of its columns are not consecutive.
fn consecutive_rows<'a>(matrix: Matrix<'_>, copy: &'a mut Vec<f32>) -> Matrix<'a> {
    let Matrix { elements, rows, columns, row_stride, column_stride } = matrix;
    assert_eq!(row_stride, 1, "consecutive elements in each column");
    let numel = rows * columns;
    copy.resize(copy.len().max(numel), 0.0);
    let target = &mut copy[..numel];
    // The memory of the last column may end before the next one would begin.
    let whole = columns.min(elements.len() / column_stride);
    let source = &elements[..whole * column_stride];
    // A flop mirrors: without it, the function turns by a quarter.
    let (flip, flop) = (FlipMode::NoFlip, FlopMode::Flop);
    transpose_plane_f32(source, column_stride, target, columns, rows, whole, flip, flop)
        .expect("matrices of these sizes");
    for column in whole..columns {
        for (row, &element) in elements[column * column_stride..][..rows].iter().enumerate() {
            target[row * columns + column] = element;
        }
    }
    Matrix::new(target, [rows, columns], columns)
}

#[cfg(test)]
mod tests {
    use super::super::parts::Target;
    use super::super::tests::{elements, matrix};
    use super::super::{multiply_as_it_is, multiply_part};
    use super::*;

    /// Checks that a product in blocks has the bits of the whole.
    fn check(factors: [Matrix<'_>; 2]) {
        let [rows, inner, columns] = [factors[0].rows, factors[0].columns, factors[1].columns];
        for adds in [false, true] {
            let [expected, in_blocks] = [multiply_as_it_is, multiply_part].map(|multiply| {
                // Rows of the target are farther apart than they are long.
                let mut target = vec![1f32; rows * (columns + 3)];
                let start = target.as_mut_ptr();
                // SAFETY: the vector has room for the product.
                unsafe { multiply(Target { start, stride: columns + 3 }, adds, 0.5, factors) };
                target
            });
            assert_eq!(in_blocks, expected, "{rows} x {inner} x {columns}, added: {adds}");
        }
    }

    /// Gradients of inputs of linear layers, of which the last block has columns left over, and scores of attention,
    /// whose keys are a part of the rows of a matrix.
    #[test]
    fn products_with_a_copy_have_the_bits_of_others() {
        for ([rows, inner, columns], distance) in [
            ([500, 512, 700], 512),
            ([2, 1024, 300], 1024),
            ([50, 256, 700], 256),
            ([300, 1536, 65], 1536),
            ([128, 64, 256], 768),
            ([130, 33, 70], 512),
        ] {
            let a = elements(rows * inner);
            // No element follows the last column.
            let b = elements((columns - 1) * distance + inner);
            let b = Matrix::new(&b, [columns, inner], distance).transposed();
            let is_copied = distance % 512 == 0 || has_wide_kernels();
            assert_eq!(is_copied_first(b), is_copied, "{inner} x {columns}");
            check([matrix(&a, [rows, inner], false), b]);
        }
    }

    /// Gradients of weights: one of several blocks, of which the last has more columns, and one of a block.
    #[test]
    fn gradients_of_weights_in_blocks_have_the_bits_of_the_whole() {
        for [rows, inner, columns] in [[384, 512, 700], [2, 1024, 300], [70, 900, 130]] {
            let (a, b) = (elements(rows * inner), elements(inner * columns));
            let factors = [matrix(&a, [rows, inner], true), matrix(&b, [inner, columns], false)];
            let mut starts = Vec::new();
            for_each_block(factors[0], factors[1], |first, block| {
                assert_eq!(block.column_stride, 1);
                starts.push(first);
            });
            let blocks = if has_wide_kernels() { columns / UNPACKED } else { 1 };
            let expected: Vec<usize> = (0..blocks).map(|at| at * UNPACKED).collect();
            assert_eq!(starts, expected, "{columns} columns");
            check(factors);
        }
    }

    #[test]
    fn a_factor_is_copied_only_where_its_columns_share_lines_of_the_cache() {
        let b = elements(1024 * 64);
        let is_copied = |inner| is_copied_first(matrix(&b, [inner, 64], true));
        let expected = [true, true, has_wide_kernels(), false];
        assert_eq!([512, 1024, 768, 576].map(is_copied), expected);
        let whole = matrix(&b, [1024, 64], true);
        assert!(!is_copied_first(whole.transposed().rows(0..32)), "rows are consecutive");
        assert!(is_copied_first(whole.rows(0..512)), "half of each column");
    }
}
