//! The part of a mask that belongs to a rank's part of a tensor.

use std::sync::Arc;

use fsdp_kernels::{MaskPart, MaskSource, Places};

use crate::layout::Mesh;

/// Which elements of the tensors that a layer gets a tensor parallel rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Values {
    /// All features of this rank's positions, which under sequence parallel are a part of all.
    Whole,
    /// All features of all positions.
    AllPositions,
    /// A part of the features, or of the heads, of all positions.
    Columns,
}

/// A mask that a layer has drawn, for a tensor of any shape.
#[derive(Clone, Debug)]
pub(crate) struct DrawnMask {
    pub(super) source: MaskSource,
    /// Path of the layer.
    pub(super) path: Arc<str>,
    /// The ranks among which the tensor may be divided; `None` for a layer that is not sharded.
    pub(super) mesh: Option<Mesh>,
    pub(super) values: Values,
    /// Whether a dropout layer has drawn the mask, and not an adapter, whose values its matrix decides.
    pub(super) is_layer: bool,
}

/// A mask of a tensor, or the part of one that belongs to a rank's part of a tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mask {
    pub(crate) source: MaskSource,
    /// Which elements of the mask the tensor has; `None` for all.
    pub(crate) part: Option<MaskPart>,
}

impl From<MaskSource> for Mask {
    fn from(source: MaskSource) -> Self {
        Self { source, part: None }
    }
}

impl DrawnMask {
    /// Returns the source of the mask.
    pub(crate) fn source(&self) -> MaskSource {
        self.source
    }

    /// Returns the mask of a tensor `[.., positions, features]`, of which this rank has a part of these
    /// dimensions. An element has the mask that it has in the whole tensor. Sequence parallel ranks have parts of the
    /// positions only if `in_forward`: in the forward of a unit.
    pub(in crate::module) fn of(&self, dims: &[usize], in_forward: bool) -> Mask {
        let part = self.mesh.and_then(|mesh| {
            let (outer, [positions, features]) = match *dims {
                [] => return None,
                [len] => (1, [len, 1]),
                [ref outer @ .., positions, features] => {
                    (outer.iter().product(), [positions, features])
                }
            };
            let positions = self.positions((mesh, in_forward), positions);
            let features = self.columns(features);
            let is_all = positions.is_all() && features.is_all();
            let dims = [Places::all(outer), Places::all(1), positions, features];
            (!is_all).then_some(MaskPart::new(dims))
        });
        Mask { source: self.source, part }
    }

    /// Returns the path of the layer.
    pub(in crate::module) fn path(&self) -> &str {
        &self.path
    }

    /// Returns whether a dropout layer has drawn the mask, and not an adapter.
    pub(in crate::module) fn is_layer(&self) -> bool {
        self.is_layer
    }

    /// Returns whether the layer gets a part of the features or of the heads.
    pub(in crate::module) fn has_columns(&self) -> bool {
        self.values == Values::Columns
    }

    /// Returns the places of this rank's features or heads among those of all tensor parallel ranks.
    pub(in crate::module) fn columns(&self, own: usize) -> Places {
        match self.mesh {
            Some(mesh) if self.values == Values::Columns => {
                let (at, whole) = (mesh.tensor_rank().index(), own * mesh.tensor_size().size());
                Places::blocks(whole, [at * own..(at + 1) * own, whole..whole])
            }
            _ => Places::all(own),
        }
    }

    /// Returns the places of this rank's positions in whole rows.
    fn positions(&self, (mesh, in_forward): (Mesh, bool), own: usize) -> Places {
        let splits_sequence = self.values == Values::Whole && mesh.splits_sequence() && in_forward;
        let (at, sequence) = match splits_sequence {
            true => (mesh.tensor_rank().index(), mesh.tensor_size().size()),
            false => (0, 1),
        };
        let (context, of_part) = (mesh.context_size().size(), own * sequence);
        let whole = of_part * context;
        let blocks = match mesh.context_part(whole) {
            Ok(part) => part.blocks(),
            // No part of rows, which would have two blocks: any places that are this rank's alone.
            Err(_) => {
                let start = mesh.context_rank().index() * of_part;
                [start..start + of_part, whole..whole]
            }
        };
        let mut runs = Places::blocks(whole, blocks).runs(at * own..(at + 1) * own);
        let mut run = || runs.next().map_or(whole..whole, |(run, at)| at..at + run.len());
        Places::blocks(whole, [run(), run()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::WorldSize;

    const SOURCE: MaskSource = MaskSource { key: [1, 2], counter: [3, 4], prob: 0.5 };

    /// Returns the masks of a tensor of `dims` elements on all ranks of a mesh, joined: dimension 1 by context
    /// parallel parts, and dimension 2 by tensor parallel ranks.
    fn joined(context: usize, tensor: usize, dims: [usize; 3]) -> Vec<f32> {
        let [rows, length, width] = dims;
        let mut whole = vec![f32::NAN; rows * length * width];
        let world = WorldSize::new(context * tensor).unwrap();
        for rank in world.ranks() {
            let mesh = Mesh::new(rank, world).tensor_parallel(tensor).unwrap();
            let mesh = mesh.context_parallel(context).unwrap();
            let (mesh_of, values) = (Some(mesh), Values::Columns);
            let path = "dropout".into();
            let drawn = DrawnMask { source: SOURCE, path, mesh: mesh_of, values, is_layer: true };
            let part = mesh.context_part(length).unwrap();
            let own = [rows, part.len(), width / tensor];
            let mask = match drawn.of(&own, true).part {
                Some(part) => SOURCE.mask_of(&part),
                None => SOURCE.mask(own.iter().product()),
            };
            let first = mesh.tensor_rank().index() * own[2];
            for row in 0..rows {
                for (local, position) in part.indices().enumerate() {
                    let from = &mask[(row * own[1] + local) * own[2]..][..own[2]];
                    whole[(row * length + position) * width + first..][..own[2]]
                        .copy_from_slice(from);
                }
            }
        }
        whole
    }

    #[test]
    fn the_masks_of_all_ranks_are_that_of_the_whole_tensor() {
        let dims = [2, 16, 12];
        let whole = SOURCE.mask(dims.iter().product());
        for (context, tensor) in [(1, 1), (2, 1), (1, 2), (4, 1), (2, 4)] {
            assert_eq!(joined(context, tensor, dims), whole, "{context} x {tensor}");
        }
    }
}
