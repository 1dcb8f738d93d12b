//! Products that are computed transposed, where this takes less time.

use super::column_blocks::{for_each_block, transposition};
use super::parts::{Target, blocks, keeps_bits};
use super::{Matrix, multiply_as_it_is};

/// Returns whether the transposed product, whose result is transposed at the end, takes less time.
///
/// The kernels of `gemm` compute vectors of columns, and need a second factor with consecutive elements in each
/// row. The transposed product has vectors of rows, and needs consecutive elements in each column of the first.
pub(super) fn is_faster_turned(a: Matrix<'_>, b: Matrix<'_>) -> bool {
    /// Multiplications that take as long as it takes to transpose an element of the result.
    const RESULT: usize = 60;
    const VECTOR: usize = 16;
    let (rows, inner, columns) = (a.rows, a.columns, b.columns);
    let multiplications =
        |others: usize, vectors: usize| others * inner * vectors.next_multiple_of(VECTOR);
    let plain = multiplications(rows, columns) + transposition(b);
    let turned =
        multiplications(columns, rows) + transposition(a.transposed()) + RESULT * rows * columns;
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
    let mut products: Vec<f32> = Vec::new();
    for_each_block(a, b, |column, b| {
        for (first, count) in blocks(a.rows, ROWS) {
            products.clear();
            products.reserve(count * b.columns);
            let part = Target { start: products.as_mut_ptr(), stride: b.columns };
            // SAFETY: the vector has room for the products of `count` rows. The target is that of the caller.
            unsafe {
                multiply_as_it_is(part, false, scale, [a.rows(first..first + count), b]);
                products.set_len(count * b.columns);
                transpose(&products, b.columns, target.part(column, first));
            }
        }
    });
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
    use super::super::multiply_by_gemm;
    use super::super::parts::Threads;
    use super::super::tests::{elements, matrix};
    use super::*;

    /// A gradient of a thin factor, and a gradient of few rows through a wide weight.
    #[test]
    fn turned_products_have_the_bits_of_the_others() {
        for ([rows, inner, columns], transposed) in [
            ([768, 300, 8], [true, false]),
            ([70, 900, 3000], [false, true]),
            ([128, 3000, 600], [false, true]),
            ([128, 1536, 384], [false, true]),
            ([140, 16_384, 300], [false, true]),
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
            unsafe { multiply_as_it_is(target, false, 0.5, factors) };
            for threads in [1, 2, 3] {
                // Rows of the target are farther apart than they are long.
                let mut turned = vec![1f32; rows * (columns + 3)];
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let target = Target { start: turned.as_mut_ptr(), stride: columns + 3 };
                // SAFETY: the vector has room for the product.
                pool.install(|| unsafe {
                    multiply_by_gemm(Threads::Pool, target, false, 0.5, factors);
                });
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
