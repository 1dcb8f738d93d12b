//! This rank's part of the sum of a tensor over a process group.

use std::iter;
use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Shape};

use super::core::Schedule;
use crate::backend::ops::narrowed;
use crate::backend::{Float, ModelBackend, Raw, RawFloat, ShardBackend, cast};
use crate::collectives::group::AnyProcessGroup;
use crate::collectives::{Op, ProcessGroup, Reduce, ReduceScatter};
use crate::error::Error;
use crate::layout::{ALIGNMENT, MatrixForm, StorageType, UnitLayout, WorldSize};

impl<B: ModelBackend> Schedule<B> {
    /// Returns the sum over a group of the part of the member `own`, in the dtype of the parts. `parts` has a flat
    /// tensor for each member, all of one length.
    pub(super) fn sum_of_part(
        &self,
        group: &Arc<AnyProcessGroup>,
        (own, members): (usize, WorldSize),
        what: &'static str,
        parts: Vec<RawFloat<B>>,
    ) -> Result<RawFloat<B>, Error> {
        let (numel, dtype) = (parts[0].shape().num_elements(), parts[0].dtype());
        // Each part is one matrix of a flat range, and begins where the member's shard does.
        let padded = numel.next_multiple_of(ALIGNMENT);
        let zeros = |len: usize| Raw::<B>::float_zeros([len].into(), &self.device, dtype.into());
        let pad = |part| match padded - numel {
            0 => Some(part),
            missing => Some(Raw::<B>::float_cat(vec![part, zeros(missing)], 0)),
        };
        let gradients = parts.into_iter().map(pad).collect();
        let op = Op::new("reduce_scatter", what).of(numel);
        let device = self.device.clone();
        let sums = self.issue(group, move |group| {
            let keep = |member| {
                // Engines give a rank its whole shard.
                let len = if member == own { padded } else { 0 };
                Reduce { range: 0..len, shape: vec![len], segment: Some(member), dtype }
            };
            let keep: Vec<_> = (0..members.size()).map(keep).collect();
            let layout = one_matrix_each((dtype, padded), members);
            let request = ReduceScatter { gradients, keep: &keep, layout: &layout, divisor: 1 };
            ProcessGroup::<Raw<B>>::reduce_scatter(group, &op, &device, request)
        });
        let sum = sums.wait()?.swap_remove(own).expect("each rank gives a tensor");
        let sum = if padded > numel { narrowed::<Raw<B>>(&sum, 0, 0..numel) } else { sum };
        Ok(cast::<Raw<B>>(sum, dtype))
    }
}

/// Returns the layout of a matrix for each member of a group, which is the member's shard.
fn one_matrix_each((dtype, numel): (DType, usize), members: WorldSize) -> UnitLayout {
    let form = MatrixForm { dtype, storage: StorageType::F32, codes: None, record: 1 };
    UnitLayout::stored_as(iter::repeat_n((form, numel), members.size()), members)
}

/// Returns a tensor with one dimension.
pub(super) fn flattened<B: ShardBackend>(tensor: Float<B>) -> Float<B> {
    let numel = tensor.shape().num_elements();
    B::float_reshape(tensor, Shape::from([numel]))
}

/// Returns the tensors of these shapes of which a flat one was joined.
pub(super) fn split_flat<B: ShardBackend>(flat: &Float<B>, shapes: &[Shape]) -> Vec<Float<B>> {
    let mut start = 0;
    let tensor = |shape: &Shape| {
        let range = start..start + shape.num_elements();
        start = range.end;
        B::float_reshape(narrowed::<B>(flat, 0, range), shape.clone())
    };
    shapes.iter().map(tensor).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::WorldSize;

    #[test]
    fn the_matrix_of_a_member_is_its_shard() {
        let members = WorldSize::new(3).unwrap();
        for numel in [1, 64, 100, 1000] {
            let padded = usize::next_multiple_of(numel, ALIGNMENT);
            let layout = one_matrix_each((DType::F32, padded), members);
            for (at, rank) in members.ranks().enumerate() {
                for matrix in 0..3 {
                    let owned = layout.shard_of(matrix, rank);
                    assert_eq!(owned.len(), if matrix == at { padded } else { 0 }, "{numel}");
                }
            }
        }
    }
}
