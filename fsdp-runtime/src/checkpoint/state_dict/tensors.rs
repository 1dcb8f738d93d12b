//! The state dicts of models.

use std::collections::BTreeMap;
use std::ops::{Deref, Range};

use burn::tensor::{DType, TensorData};

use super::layout::LocalLayout;

/// Full tensors by module path. Tied parameters appear once, under their owner's path.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FullState(pub(super) BTreeMap<String, TensorData>);

/// This rank's elements of the full tensors, by module path.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ShardedState(pub(super) BTreeMap<String, ShardedTensor>);

/// This rank's tensors in the shapes in which the rank stores them between steps. It can be loaded
/// only at the same world size, rank, strategy and wrapping.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalState {
    pub(super) layout: LocalLayout,
    pub(super) tensors: BTreeMap<String, TensorData>,
}

/// This rank's elements of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardedTensor {
    /// Shape of the full tensor.
    pub shape: Vec<usize>,
    /// Range of this rank's elements in the flattened full tensor.
    pub range: Range<usize>,
    /// Values of the elements, of shape `[range.len()]`.
    pub data: TensorData,
}

impl Deref for FullState {
    type Target = BTreeMap<String, TensorData>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl Deref for ShardedState {
    type Target = BTreeMap<String, ShardedTensor>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<'a> IntoIterator for &'a FullState {
    type Item = (&'a String, &'a TensorData);
    type IntoIter = std::collections::btree_map::Iter<'a, String, TensorData>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl IntoIterator for FullState {
    type Item = (String, TensorData);
    type IntoIter = std::collections::btree_map::IntoIter<String, TensorData>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl FromIterator<(String, TensorData)> for FullState {
    fn from_iter<I: IntoIterator<Item = (String, TensorData)>>(tensors: I) -> Self {
        Self(tensors.into_iter().collect())
    }
}

impl LocalState {
    /// Returns the tensors by module path.
    pub fn tensors(&self) -> &BTreeMap<String, TensorData> {
        &self.tensors
    }
}

/// Returns the elements of `data` in another shape.
pub(super) fn reshaped(data: TensorData, shape: Vec<usize>) -> TensorData {
    let (bytes, _, dtype) = data.into_parts();
    TensorData::from_bytes(bytes, shape, dtype)
}

/// Returns a copy of a tensor's bytes as tensor data.
pub(super) fn copied_data(bytes: &[u8], shape: Vec<usize>, dtype: DType) -> TensorData {
    if dtype == DType::F32 {
        // A vector of f32 is aligned for f32, so that a tensor takes it without a copy.
        let mut elements = vec![0f32; bytes.len() / size_of::<f32>()];
        bytemuck::cast_slice_mut(&mut elements).copy_from_slice(bytes);
        return TensorData::new(elements, shape);
    }
    TensorData::from_bytes_vec(bytes.to_vec(), shape, dtype)
}
