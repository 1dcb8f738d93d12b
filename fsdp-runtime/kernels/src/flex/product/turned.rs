//! Products that are computed transposed, where this takes less time.

use super::{Matrix, Target, keeps_bits, multiply_part};

/// Returns whether the transposed product, whose result is transposed at the end, takes less time.
///
/// The kernels of `gemm` compute vectors of columns, and transpose a second factor whose rows are not
/// consecutive. The transposed product has vectors of rows, and transposes a first factor whose columns are not.
pub(super) fn is_faster_turned(a: Matrix<'_>, b: Matrix<'_>) -> bool {
    /// Multiplications that take as long as it takes to transpose an element of a factor, and of the result.
    const FACTOR: usize = 60;
    const RESULT: usize = 120;
    const VECTOR: usize = 16;
    let (rows, inner, columns) = (a.rows, a.columns, b.columns);
    let cost = |others: usize, vectors: usize, is_consecutive: bool| {
        let transposed = if is_consecutive { 0 } else { FACTOR * inner * vectors };
        others * inner * vectors.next_multiple_of(VECTOR) + transposed
    };
    let plain = cost(rows, columns, b.column_stride == 1);
    let turned = cost(columns, rows, a.row_stride == 1) + RESULT * rows * columns;
    // Both have the same bits where no result is so small that `gemm` has a kernel of its own for it.
    keeps_bits([rows, columns]) && turned + turned / 16 < plain
}

/// Writes the transpose of `scale · a · b`, on the calling thread.
///
/// # Safety
///
/// The columns of the target, as many as `a` has rows, lie in memory that nothing else uses.
pub(super) unsafe fn multiply_turned(target: Target, scale: f32, [a, b]: [Matrix<'_>; 2]) {
    /// Rows of `a` whose products lie in memory at once: as many as stay in the cache.
    const ROWS: usize = 2048;
    let columns = b.columns;
    let mut products: Vec<f32> = Vec::with_capacity(a.rows.min(2 * ROWS) * columns);
    for (first, count) in blocks(a.rows, ROWS) {
        let part = Target { start: products.as_mut_ptr(), stride: columns };
        // SAFETY: the vector has room for `count` rows. The target is that of the caller.
        unsafe {
            multiply_part(part, false, scale, [a.rows(first..first + count), b]);
            products.set_len(count * columns);
            transpose(&products, columns, target.part(0, first));
        }
    }
}

/// Returns the first row and the number of rows of each block. The last block has the rows that are left over as
/// well, so that no block has so few rows that `gemm` adds their terms in another order.
fn blocks(rows: usize, size: usize) -> impl Iterator<Item = (usize, usize)> {
    let count = (rows / size).max(1);
    (0..count).map(move |at| {
        let end = if at + 1 == count { rows } else { (at + 1) * size };
        (at * size, end - at * size)
    })
}

/// Writes the transpose of rows of `len` elements.
///
/// # Safety
///
/// The columns of the target, as many as there are rows, lie in memory that nothing else uses.
unsafe fn transpose(rows: &[f32], len: usize, target: Target) {
    const TILE: usize = 8;
    let count = rows.len() / len;
    for first in (0..count).step_by(TILE) {
        for start in (0..len).step_by(TILE) {
            for at in start..(start + TILE).min(len) {
                for row in first..(first + TILE).min(count) {
                    // SAFETY: as the caller promises.
                    unsafe { target.part(at, row).start.write(rows[row * len + at]) };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{elements, matrix};
    use super::super::{Threads, multiply};
    use super::*;

    /// A gradient of a thin factor, and a gradient of few rows through a wide weight.
    #[test]
    fn turned_products_have_the_bits_of_the_others() {
        for ([rows, inner, columns], transposed) in [
            ([768, 300, 8], [true, false]),
            ([70, 900, 3000], [false, true]),
            ([130, 3000, 600], [false, true]),
            ([5000, 64, 2], [true, false]),
            ([66, 700, 4500], [false, true]),
        ] {
            let (a, b) = (elements(rows * inner), elements(inner * columns));
            let factors = [
                matrix(&a, [rows, inner], transposed[0]),
                matrix(&b, [inner, columns], transposed[1]),
            ];
            assert!(is_faster_turned(factors[0], factors[1]), "{rows}, {inner}, {columns}");
            let mut plain = vec![0f32; rows * columns];
            let target = Target { start: plain.as_mut_ptr(), stride: columns };
            // SAFETY: the vector has room for the product.
            unsafe { multiply_part(target, false, 0.5, factors) };
            for threads in [1, 2, 3] {
                // Rows of the target are farther apart than they are long.
                let mut turned = vec![1f32; rows * (columns + 3)];
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let target = (&mut turned[..], columns + 3);
                pool.install(|| multiply(Threads::Pool, target, false, 0.5, factors));
                for (turned, plain) in turned.chunks(columns + 3).zip(plain.chunks(columns)) {
                    assert!(
                        turned.starts_with(plain) && turned.ends_with(&[1.0; 3]),
                        "{rows}, {inner}"
                    );
                }
            }
        }
    }
}
