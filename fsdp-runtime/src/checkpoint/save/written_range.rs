//! The assignment of a tensor's elements to the ranks that write them.

use std::ops::Range;

use crate::layout::Mesh;
use crate::module::ParamIndex;
use crate::param_group::{ParamSpec, Placement};

/// Number of elements from which all ranks write a replicated tensor together. One rank writes a
/// smaller tensor alone, since each piece costs a line of the manifest.
const SPLIT_FROM: usize = 1 << 10;

/// Returns the elements of a parameter, or of optimizer state of the same shape, that this rank
/// writes; of codes, the words. Every element is written by exactly one rank.
pub(super) fn written_of_param(mesh: Mesh, index: ParamIndex, spec: &ParamSpec) -> Range<usize> {
    match &spec.placement {
        // Each copy of the model has the shard, and each writes a part of it.
        Placement::Shard(_) => {
            nth_part(spec.stored_range(), mesh.replica().index(), mesh.replicas().size())
        }
        Placement::Replicated | Placement::PerRank => {
            written_of_replicated(mesh, index, spec.stored_range().len())
        }
        Placement::TiedTo(_) => 0..0,
    }
}

/// Returns the elements that this rank writes of a tensor of `numel` elements that every rank
/// stores in full.
pub(super) fn written_of_replicated(mesh: Mesh, index: ParamIndex, numel: usize) -> Range<usize> {
    let (rank, world) = (mesh.rank.index(), mesh.world.size());
    if numel >= SPLIT_FROM {
        return nth_part(0..numel, rank, world);
    }
    // One rank writes the tensor, a different rank for the next parameter.
    if (index.unit + index.param) % world == rank { 0..numel } else { 0..0 }
}

/// Returns the elements that this rank writes of a tensor of `numel` elements that one rank in each
/// copy of the model owns. This rank must be such an owner.
pub(super) fn written_of_owned(mesh: Mesh, numel: usize) -> Range<usize> {
    nth_part(0..numel, mesh.replica().index(), mesh.replicas().size())
}

/// Returns part `index` of `range` divided into `count` parts of about equal length.
fn nth_part(range: Range<usize>, index: usize, count: usize) -> Range<usize> {
    let bound =
        |index: usize| range.start + (range.len() as u128 * index as u128 / count as u128) as usize;
    bound(index)..bound(index + 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::WorldSize;

    proptest! {
        #[test]
        fn ranks_write_every_element_of_a_replicated_tensor_once(
            numel in prop_oneof![0usize..200, SPLIT_FROM - 2..SPLIT_FROM + 300],
            world in 1usize..20,
            unit in 0usize..5,
            entry in 0usize..5,
        ) {
            let world = WorldSize::new(world).unwrap();
            let mut covered = 0;
            for rank in world.ranks() {
                let mesh = Mesh::new(rank, world);
                let range = written_of_replicated(mesh, ParamIndex { unit, param: entry }, numel);
                if !range.is_empty() {
                    prop_assert_eq!(range.start, covered);
                    covered = range.end;
                }
            }
            prop_assert_eq!(covered, numel);
        }
    }
}
