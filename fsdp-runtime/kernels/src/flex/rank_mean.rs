//! Means of the parts of all ranks.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Shape};

use super::float::{KernelFloat, contiguous, slice, with_float_type};
use super::known_rows::{known_rows, rows_of_all};
use super::loops;
use super::new_tensor::{Uninit, new_tensor};
use crate::contract::RankMean;

/// Computes one mean of [`Kernels::rank_means`](crate::Kernels::rank_means).
pub(super) fn rank_mean(mean: RankMean<FlexTensor>) -> FlexTensor {
    let RankMean { parts, divisor, shape } = mean;
    if let ([(part, 0)], 1) = (&parts[..], divisor)
        && is_whole(part, &shape)
    {
        return part.reshape(shape);
    }
    let parts: Vec<_> = parts.into_iter().map(|(part, start)| (contiguous(part), start)).collect();
    let rows = rows_of_parts(&parts, shape.num_elements());
    with_float_type!(parts[0].0.dtype(), |I| {
        let parts: Vec<&[I]> =
            parts.iter().map(|(part, start)| &slice::<I>(part)[*start..]).collect();
        new_tensor(shape, |at, sums| match &rows {
            Some(rows) => mean_of_rows(&parts, rows, at, sums, divisor as f32),
            None => {
                let range = at..at + sums.len();
                let parts: Vec<&[I]> = parts.iter().map(|part| &part[range.clone()]).collect();
                loops::mean(&parts, sums, divisor as f32)
            }
        })
    })
}

/// Returns whether a tensor is contiguous, of f32, and has as many elements as the shape and its memory.
fn is_whole(tensor: &FlexTensor, shape: &Shape) -> bool {
    let numel = shape.num_elements();
    tensor.dtype() == DType::F32
        && tensor.is_contiguous()
        && tensor.shape().num_elements() == numel
        && tensor.bytes().len() == numel * size_of::<f32>()
}

/// Elements of a mean that some of the parts have, and which of them.
type PartRow = (Range<usize>, Vec<bool>);

/// Returns the rows outside which the parts are zero, if they are known for all parts.
fn rows_of_parts(parts: &[(FlexTensor, usize)], numel: usize) -> Option<Vec<PartRow>> {
    let start = parts[0].1;
    if parts.iter().any(|part| part.1 != start) {
        return None;
    }
    let known: Option<Vec<Arc<_>>> = parts.iter().map(|(part, _)| known_rows(part)).collect();
    rows_of_all(&known?, start, numel)
}

/// Writes the mean of elements from `at` on, of which all outside the rows are zero.
fn mean_of_rows<'a, I: KernelFloat>(
    parts: &[&[I]],
    rows: &[PartRow],
    at: usize,
    sums: &'a mut Uninit<f32>,
    divisor: f32,
) -> &'a mut [f32] {
    let end = at + sums.len();
    sums.fill(MaybeUninit::new(0.0));
    let mut zeros = Vec::new();
    let first = rows.partition_point(|(row, _)| row.end <= at);
    for (row, has) in rows[first..].iter().take_while(|(row, _)| row.start < end) {
        let row = row.start.max(at)..row.end.min(end);
        zeros.resize(row.len(), I::zeroed());
        let parts: Vec<&[I]> = parts
            .iter()
            .zip(has)
            .map(|(part, &has)| if has { &part[row.clone()] } else { &zeros[..] })
            .collect();
        loops::mean(&parts, &mut sums[row.start - at..row.end - at], divisor);
    }
    // SAFETY: all elements were written.
    unsafe { sums.assume_init_mut() }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use super::*;
    use crate::flex::table::gradient;

    /// Gradients of a large table, and the same elements as tensors of other memory.
    #[test]
    fn means_of_tables_have_the_bits_of_means_of_all_elements() {
        let (rows, width) = (5000, 70);
        let tables: Vec<FlexTensor> = (0..3)
            .map(|rank| {
                let ids: Vec<f32> =
                    (0..60).map(|at| ((at * 83 + rank * 41) % 5000) as f32).collect();
                let grads: Vec<f32> =
                    (0..60 * width).map(|at| ((at * 7919 + rank) % 1013) as f32 - 500.0).collect();
                gradient(&grads, &ids, Shape::from([rows, width]))
            })
            .collect();
        let copies = tables.iter().map(|table| {
            let elements = table.as_slice::<f32>().expect("f32").to_vec();
            FlexTensor::from_data(TensorData::new(elements, [rows, width]))
        });
        let copies: Vec<FlexTensor> = copies.collect();
        for (start, numel) in [(0, rows * width), (83 * width + 5, 200_003), (349_999, 1)] {
            let mean = |tables: &[FlexTensor]| {
                let parts = tables.iter().map(|table| (table.clone(), start)).collect();
                rank_mean(RankMean { parts, divisor: 3, shape: Shape::from([numel]) })
            };
            let parts: Vec<_> = tables.iter().map(|table| (table.clone(), start)).collect();
            assert!(rows_of_parts(&parts, numel).is_some());
            let bits = |mean: FlexTensor| -> Vec<u32> {
                mean.as_slice::<f32>().expect("f32").iter().map(|mean| mean.to_bits()).collect()
            };
            assert!(bits(mean(&tables)) == bits(mean(&copies)), "{numel} from {start} on");
        }
        let mixed = vec![(tables[0].clone(), 0), (copies[1].clone(), 0)];
        assert!(rows_of_parts(&mixed, rows * width).is_none(), "a part of other memory");
    }
}
