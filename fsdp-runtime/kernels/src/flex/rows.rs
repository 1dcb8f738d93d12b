//! Sums and maxima of a row, and the division of a tensor into rows.
//!
//! Element `i` of a row is added to sum `i mod 16`, and the 16 sums are added in order. So a row's sum
//! depends only on the row, and the compiler vectorises the loop.

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;

use super::new_tensor::TASK;

/// Number of partial sums of a row.
const LANES: usize = 16;

/// Returns the length of the tensor's rows, which is that of its last dimension.
pub(super) fn row_len(tensor: &FlexTensor) -> usize {
    *tensor.shape().last().expect("a tensor has at least one dimension")
}

/// Returns the number of elements of the rows that one task of the thread pool computes. It does not
/// depend on the number of threads.
pub(super) fn task_len(row_len: usize) -> usize {
    (TASK / row_len).max(1) * row_len
}

/// Returns the sum of the elements.
#[inline(always)]
pub(super) fn row_sum(row: &[f32]) -> f32 {
    row_sum_of(row, |x| x)
}

/// Returns the sum of `term(x)` over the elements.
#[inline(always)]
pub(super) fn row_sum_of(row: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let (chunks, rest) = row.as_chunks::<LANES>();
    let mut sums = [0f32; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            sums[lane] += term(chunk[lane]);
        }
    }
    for (sum, &x) in sums.iter_mut().zip(rest) {
        *sum += term(x);
    }
    sums.into_iter().sum()
}

/// Returns the sum of `term(a, b)` over the pairs of elements of two rows of equal length.
#[inline(always)]
pub(super) fn pair_sum_of(a: &[f32], b: &[f32], term: impl Fn(f32, f32) -> f32) -> f32 {
    let ((a_chunks, a_rest), (b_chunks, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sums = [0f32; LANES];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..LANES {
            sums[lane] += term(a[lane], b[lane]);
        }
    }
    for (sum, (&a, &b)) in sums.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *sum += term(a, b);
    }
    sums.into_iter().sum()
}

/// Returns the largest element; negative infinity if there is none but NaN.
#[inline(always)]
pub(super) fn row_max(row: &[f32]) -> f32 {
    // Unlike `f32::max` this is one instruction.
    let larger = |top: f32, x: f32| if x > top { x } else { top };
    let (chunks, rest) = row.as_chunks::<LANES>();
    let mut tops = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            tops[lane] = larger(tops[lane], chunk[lane]);
        }
    }
    tops.iter().chain(rest).fold(f32::NEG_INFINITY, |top, &x| larger(top, x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_and_maxima_include_every_element() {
        for len in [1, 2, 15, 16, 17, 31, 32, 33, 100] {
            // Sums of powers of two up to 2²³ are exact.
            let row: Vec<f32> = (0..len).map(|i| 2f32.powi(i % 12)).collect();
            let sum: f64 = row.iter().map(|&x| f64::from(x)).sum();
            assert_eq!(f64::from(row_sum(&row)), sum);
            assert_eq!(f64::from(row_sum_of(&row, |x| 2.0 * x)), 2.0 * sum);
            assert_eq!(f64::from(pair_sum_of(&row, &row, |a, b| a + b)), 2.0 * sum);
            for at in 0..row.len() {
                let mut row = vec![-7.0; row.len()];
                row[at] = -3.0;
                assert_eq!(row_max(&row), -3.0, "element {at} of {len}");
            }
        }
        assert_eq!(row_max(&[f32::NAN, 2.0]), 2.0);
        assert_eq!(row_max(&[f32::NEG_INFINITY]), f32::NEG_INFINITY);
    }
}
