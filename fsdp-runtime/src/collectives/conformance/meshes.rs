//! The collectives of tensor parallel and context parallel ranks, in the groups of a mesh.

use super::*;
use crate::collectives::group::MeshGroups;
use crate::layout::{ALIGNMENT, MatrixForm, Mesh, StorageType};

/// Sums activations over tensor parallel ranks; gathers over context parallel ranks, and passes tensors around; and
/// gives each of these its part of a sum.
pub(super) fn groups_of_a_mesh<B: Tested>(group: &AnyProcessGroup) {
    let world = Arc::new(group.split(0).unwrap());
    let size = WorldSize::new(world.size()).unwrap();
    let rank = size.rank(index(group)).unwrap();
    let tensor = if size.size().is_multiple_of(2) { 2 } else { 1 };
    let mesh = Mesh::new(rank, size).tensor_parallel(tensor).unwrap();
    let mesh = mesh.context_parallel(mesh.world.size()).unwrap();
    let groups = MeshGroups::new(&world, mesh).unwrap();
    assert_eq!(groups.tensor.is_some(), tensor > 1);
    assert_eq!(groups.context.is_some(), mesh.world.size() > 1);
    for dtype in DTYPES {
        for numel in [1, 100, 7919] {
            if let Some(tensor) = &groups.tensor {
                sum::<B>(tensor, numel, dtype);
                sum_of_part::<B>(tensor, numel, dtype);
            }
            if let Some(context) = &groups.context {
                gathered::<B>(context, numel, dtype);
                rotated::<B>(context, numel, dtype);
                sum_of_part::<B>(context, numel, dtype);
            }
        }
    }
}

/// Returns the numbers of a group's members in the world.
fn members(group: &AnyProcessGroup) -> Vec<usize> {
    group.members().iter().map(|rank| rank.index()).collect()
}

/// Sums a tensor that every member has.
fn sum<B: Tested>(group: &AnyProcessGroup, numel: usize, dtype: DType) {
    let own = tensor_as::<B>(values(group.rank().index(), 0..numel), dtype);
    let layout = UnitLayout::stored_as(std::iter::empty(), WorldSize::ONE);
    let keep = [Reduce { range: 0..numel, shape: vec![numel], segment: None, dtype }];
    let request =
        ReduceScatter { gradients: vec![Some(own)], keep: &keep, layout: &layout, divisor: 1 };
    let sum = on::<B>(group).reduce_scatter(&op("all_reduce", "a layer"), &B::device(), request);
    let sum = sum.unwrap().remove(0).unwrap();
    assert_close(&elements::<B>(&sum), &mean(&members(group), 0..numel, 1, dtype));
}

/// Gathers a tensor of every member.
fn gathered<B: Tested>(group: &AnyProcessGroup, numel: usize, dtype: DType) {
    let own = tensor_as::<B>(values(group.rank().index(), 0..numel), dtype);
    let op = op("all_gather", "keys and values");
    let all = on::<B>(group).all_gather_one(&op, &B::device(), Some(own)).unwrap();
    for (found, rank) in all.iter().zip(members(group)) {
        let expected = rounded(values(rank, 0..numel), dtype);
        let found = found.as_ref().unwrap();
        assert_eq!((elements::<B>(found), found.dtype()), (expected, dtype));
    }
}

/// Passes a tensor around the group, until each member has its own again.
fn rotated<B: Tested>(group: &AnyProcessGroup, numel: usize, dtype: DType) {
    let (members, at) = (members(group), index(group));
    let mut tensor = tensor_as::<B>(values(members[at], 0..numel), dtype);
    tensor = B::float_reshape(tensor, Shape::from([1, numel]));
    let op = op("send_recv", "keys and values").of(numel);
    for step in 1..=members.len() {
        tensor = on::<B>(group).rotate(&op, &B::device(), tensor).unwrap();
        let from = members[(at + members.len() - step % members.len()) % members.len()];
        assert_eq!(elements::<B>(&tensor), rounded(values(from, 0..numel), dtype));
        assert_eq!((tensor.shape(), tensor.dtype()), (Shape::from([1, numel]), dtype));
    }
}

/// Sums a tensor of which each member keeps its part.
fn sum_of_part<B: Tested>(group: &AnyProcessGroup, numel: usize, dtype: DType) {
    let (all, own) = (members(group), group.rank().index());
    let size = WorldSize::new(all.len()).unwrap();
    let padded = numel.next_multiple_of(ALIGNMENT);
    let part = |at: usize| {
        let mut part = values(own, at * numel..(at + 1) * numel);
        part.resize(padded, 0.0);
        Some(tensor_as::<B>(part, dtype))
    };
    let at = all.iter().position(|rank| *rank == own).unwrap();
    let keep = |member| {
        let len = if member == at { padded } else { 0 };
        Reduce { range: 0..len, shape: vec![len], segment: Some(member), dtype }
    };
    let keep: Vec<_> = (0..all.len()).map(keep).collect();
    let form = MatrixForm { dtype, storage: StorageType::F32, codes: None, record: 1 };
    let layout = UnitLayout::stored_as(std::iter::repeat_n((form, padded), all.len()), size);
    let gradients = (0..all.len()).map(part).collect();
    let request = ReduceScatter { gradients, keep: &keep, layout: &layout, divisor: 1 };
    let op = op("reduce_scatter", "gradients of keys and values");
    let sums = on::<B>(group).reduce_scatter(&op, &B::device(), request).unwrap();
    let sum = sums.into_iter().nth(at).unwrap().unwrap();
    let expected = mean(&all, at * numel..(at + 1) * numel, 1, dtype);
    assert_close(&elements::<B>(&sum)[..numel], &expected);
}

/// NCCL adds in another order than the other engines.
fn assert_close(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * b.abs().max(1.0);
    assert!(found.iter().zip(expected).all(close));
}
