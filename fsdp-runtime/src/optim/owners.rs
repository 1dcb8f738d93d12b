//! The assignment of sharded matrices to the ranks that update them.

use std::cmp::Reverse;
use std::collections::HashMap;

use crate::layout::Mesh;
use crate::module::ParamIndex;
use crate::param_group::{Placement, Unit};

/// Returns the owner of each sharded matrix, as a position in the shard group. The result depends
/// only on the layout, so all ranks find the same owners.
///
/// Matrices are assigned in order of size, the largest first, each to the owner with the fewest
/// elements so far.
pub(crate) fn owners(units: &[Unit], mesh: Mesh) -> HashMap<ParamIndex, usize> {
    let mut matrices = Vec::new();
    for (index, unit) in units.iter().enumerate() {
        for (entry, spec) in unit.params.iter().enumerate() {
            if matches!(spec.placement, Placement::Shard(_)) {
                matrices.push((Reverse(spec.numel()), ParamIndex { unit: index, param: entry }));
            }
        }
    }
    matrices.sort_unstable();
    let mut loads = vec![0; mesh.shard_size().size()];
    let assign = |(Reverse(numel), index)| {
        let owner = (0..loads.len()).min_by_key(|&rank| loads[rank]).unwrap_or(0);
        loads[owner] += numel;
        (index, owner)
    };
    matrices.into_iter().map(assign).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::layout::{Rank, UnitLayout, WorldSize};
    use crate::options::ReshardAfterForward;
    use crate::param_group::{ParamSpec, UnitControl};

    fn unit(numels: &[usize], mesh: Mesh) -> Unit {
        let dtype = burn::tensor::DType::F32;
        let layout = UnitLayout::new(numels.iter().map(|&numel| (dtype, numel)), mesh.shard_size());
        let entry = |(segment, &numel): (usize, &usize)| ParamSpec {
            split: None,
            is_shared: false,
            path: format!("weights.{segment}"),
            shape: vec![numel, 1],
            dtype,
            reduce_dtype: dtype,
            placement: Placement::Shard(layout.shard_of(segment, mesh.shard_rank())),
            storage: crate::layout::StorageType::F32,
            is_trained: true,
            codes: None,
            gradient_codes: None,
            segment: Some(segment),
        };
        let entries = numels.iter().enumerate().map(entry).collect();
        Unit {
            name: Arc::from("unit"),
            path: String::new(),
            ty: "Unit",
            level: 0,
            field: false,
            params: entries,
            layout,
            gathers: true,
            precision: crate::options::Precision { input: None, output: None, params: None },
            recomputed: false,
            within: None,
            takes_model_input: true,
            group: None,
            control: UnitControl::new(ReshardAfterForward::Always),
        }
    }

    #[test]
    fn owners_are_balanced_and_the_same_on_every_rank() {
        let world = WorldSize::new(3).unwrap();
        let numels = [500, 100, 90, 80, 400, 300, 300, 200, 200, 100];
        let on = |rank| {
            let mesh = Mesh::new(rank, world);
            owners(&[unit(&numels[..4], mesh), unit(&numels[4..], mesh)], mesh)
        };
        let first = on(Rank::ZERO);
        let mut loads = [0; 3];
        for (index, owner) in &first {
            loads[*owner] += numels[index.unit * 4 + index.param];
        }
        let (least, most) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
        assert!(most - least <= 100, "{loads:?}");
        assert_eq!(first.len(), numels.len());
        assert!(world.ranks().all(|rank| on(rank) == first));
    }
}
