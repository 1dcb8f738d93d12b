//! Second factors whose rows are not consecutive in memory: above all, transposed weights.
//!
//! `gemm` transposes such a factor while it packs it for its kernels. Columns that begin a multiple of 2 KiB
//! apart share few lines of the processor's cache: packing an element then takes as long as 100 or 150
//! multiplications. A copy with consecutive rows takes a third of that time. The sizes of language models are
//! often such multiples.

use std::mem::MaybeUninit;

use super::Matrix;
use super::parts::blocks;

/// Multiplications that take as long as copying an element to a matrix with consecutive rows.
const COPY: usize = 40;

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
        _ => 30,
    }
}

/// Returns whether a copy of the factor with consecutive rows saves time.
fn is_copied_first(b: Matrix<'_>) -> bool {
    let has_adjacent_columns = b.row_stride == 1 && b.column_stride == b.rows;
    has_adjacent_columns && b.columns > 1 && packing(b) > COPY
}

/// Calls `f` with each block of columns of a second factor, and the first column of the block. The rows of a block are
/// consecutive where copies save time; else the factor is one block, where it is.
pub(super) fn for_each_block(b: Matrix<'_>, mut f: impl FnMut(usize, Matrix<'_>)) {
    if !is_copied_first(b) {
        f(0, b);
        return;
    }
    // Up to 256 columns, and no more than 4 MiB unless these are fewer than 64 columns.
    let columns = ((1 << 20) / b.rows / 64 * 64).clamp(64, 256);
    let mut copy = Vec::new();
    for (first, count) in blocks(b.columns, columns) {
        f(first, consecutive_rows(b.columns(first..first + count), &mut copy));
    }
}

/// Returns the matrix with consecutive rows, in the memory of `copy`.
///
/// # Panics
///
/// If its columns are not adjacent in memory.
fn consecutive_rows<'a>(matrix: Matrix<'_>, copy: &'a mut Vec<f32>) -> Matrix<'a> {
    let Matrix { rows, columns, .. } = matrix;
    assert_eq!([matrix.row_stride, matrix.column_stride], [1, rows], "adjacent columns");
    let numel = rows * columns;
    let elements = &matrix.elements[..numel];
    // SAFETY: `MaybeUninit<f32>` has the layout of f32, and the elements are only read.
    let elements = unsafe { &*(std::ptr::from_ref(elements) as *const [MaybeUninit<f32>]) };
    copy.clear();
    copy.reserve(numel);
    transpose::transpose(elements, &mut copy.spare_capacity_mut()[..numel], rows, columns);
    // SAFETY: the transposition copied an element to each place.
    unsafe { copy.set_len(numel) };
    Matrix::new(copy, [rows, columns], columns)
}

#[cfg(test)]
mod tests {
    use super::super::parts::Target;
    use super::super::tests::{elements, matrix};
    use super::super::{multiply_as_it_is, multiply_part};
    use super::*;

    /// Gradients of inputs of linear layers, of which the last block has columns left over.
    #[test]
    fn products_with_a_copy_have_the_bits_of_others() {
        for [rows, inner, columns] in [[500, 512, 700], [2, 1024, 300], [300, 1536, 65]] {
            let (a, b) = (elements(rows * inner), elements(inner * columns));
            let factors = [matrix(&a, [rows, inner], false), matrix(&b, [inner, columns], true)];
            assert!(is_copied_first(factors[1]), "{inner} x {columns}");
            for adds in [false, true] {
                let [expected, copied] = [multiply_as_it_is, multiply_part].map(|multiply| {
                    // Rows of the target are farther apart than they are long.
                    let mut target = vec![1f32; rows * (columns + 3)];
                    let start = target.as_mut_ptr();
                    // SAFETY: the vector has room for the product.
                    unsafe { multiply(Target { start, stride: columns + 3 }, adds, 0.5, factors) };
                    target
                });
                assert_eq!(copied, expected, "{rows} x {inner} x {columns}, added: {adds}");
            }
        }
    }

    #[test]
    fn a_factor_is_copied_only_where_its_columns_share_lines_of_the_cache() {
        let b = elements(1024 * 64);
        let is_copied = |inner| is_copied_first(matrix(&b, [inner, 64], true));
        assert_eq!([512, 1024, 576, 768].map(is_copied), [true, true, false, false]);
        let whole = matrix(&b, [1024, 64], true);
        assert!(!is_copied_first(whole.transposed().rows(0..32)), "rows are consecutive");
        let of_some_rows = whole.rows(0..512);
        assert!(!is_copied_first(of_some_rows), "columns are not adjacent");
    }
}
