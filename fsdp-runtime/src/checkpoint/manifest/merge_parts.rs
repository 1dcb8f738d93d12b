//! The merge of the ranks' partial manifests into one.

use std::collections::BTreeMap;

use super::document::Manifest;
use super::entries::TensorEntry;

impl Manifest {
    /// Adds the part of another rank: the size of its file, its pieces and its random state.
    pub(in crate::checkpoint) fn merge(&mut self, part: Self, rank: usize) {
        if let (Some(size), Some(&other)) = (self.files.get_mut(rank), part.files.get(rank)) {
            *size = other;
        }
        for (name, model) in part.models {
            match self.models.get_mut(&name) {
                None => {
                    self.models.insert(name, model);
                }
                Some(own) => {
                    merge_tensors(&mut own.tensors, model.tensors);
                    own.random.extend(model.random);
                }
            }
        }
        for (name, optimizer) in part.optimizers {
            let own = self.optimizers.entry(name).or_default();
            for (model, parameters) in optimizer.models {
                let own = own.models.entry(model).or_default();
                for (path, parameter) in parameters {
                    let own = own.entry(path).or_default();
                    own.scalars.extend(parameter.scalars);
                    merge_tensors(&mut own.tensors, parameter.tensors);
                }
            }
        }
    }
}

/// Adds the pieces of `other`, keeping the pieces of each tensor in element order.
fn merge_tensors(own: &mut BTreeMap<String, TensorEntry>, other: BTreeMap<String, TensorEntry>) {
    for (name, tensor) in other {
        match own.get_mut(&name) {
            None => {
                own.insert(name, tensor);
            }
            Some(own) => {
                own.pieces.extend(tensor.pieces);
                own.pieces.sort_by_key(|piece| (piece.part, piece.start));
            }
        }
    }
}
