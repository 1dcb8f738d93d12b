//! The parts of a manifest as data: models, optimizers, tensors, and the position of a training
//! run.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::dtype::Dtype;
use crate::checkpoint::scalar::Scalars;
use crate::layout::StorageType;

/// Number of bytes of a piece that one checksum covers. A reader checks only the blocks that it
/// reads.
pub const BLOCK: usize = 1 << 20;

/// The device mesh of the ranks that wrote a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeshShape {
    /// Number of copies of the model, each held by one process group of `shard` ranks.
    pub replicate: usize,
    /// Number of ranks over which one copy of the model is sharded.
    pub shard: usize,
    /// Number of tensor parallel ranks, each of which has a part of the split matrices.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub tensor: usize,
}

/// Position of a training run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Progress {
    /// Number of optimizer steps taken.
    pub step: u64,
    /// Number of completed passes over the data.
    pub epoch: u64,
    /// Position of the data sampler within the epoch, in a unit that the program chooses.
    pub position: u64,
    /// Factor by which the loss is multiplied; `None` without loss scaling.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "scale")]
    pub loss_scale: Option<f32>,
}

/// Serialises an f32 as text: JSON has no infinity, and a JSON reader may change a float's last
/// bit.
mod scale {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(scale: &Option<f32>, to: S) -> Result<S::Ok, S::Error> {
        match scale {
            Some(scale) => to.serialize_str(&scale.to_string()),
            None => to.serialize_none(),
        }
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Option<f32>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| text.parse().map_err(D::Error::custom)).transpose()
    }
}

/// A model in a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ModelEntry {
    /// Name of the sharding strategy, such as `FULL_SHARD`.
    pub strategy: String,
    /// The device mesh over which the model was sharded.
    pub mesh: MeshShape,
    /// The units in layout order.
    pub units: Vec<UnitEntry>,
    /// The parameters by module path. A tied parameter appears once, under its owner's path.
    pub tensors: BTreeMap<String, TensorEntry>,
    /// State of the random stream of each rank, by rank number.
    pub random: BTreeMap<usize, RandomState>,
    /// Names and layouts of parameters in the framework that the model comes from, by module path.
    /// Only parameters for which these differ from the module's are listed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub keys: BTreeMap<String, KeyEntry>,
}

/// Name and layout of a parameter in the framework that the model comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct KeyEntry {
    /// Name of the tensor in the framework that the model comes from, such as PyTorch.
    pub name: String,
    /// Whether the framework that the model comes from stores the transpose of this crate's matrix.
    pub transposed: bool,
}

/// A unit of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct UnitEntry {
    /// Module path of the unit; empty for the outermost unit.
    pub path: String,
    /// Number of units that enclose this one.
    pub level: usize,
    /// Module paths of the unit's parameters, in layout order.
    pub parameters: Vec<String>,
}

/// State of the random stream that dropout draws from, on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct RandomState {
    /// Seed of the stream.
    pub seed: u64,
    /// Number of backward passes before the save.
    pub step: u64,
}

/// State of an optimizer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct OptimizerEntry {
    /// State of each parameter that has any, by model name and then by module path.
    pub models: BTreeMap<String, BTreeMap<String, ParameterEntry>>,
}

/// State that an optimizer keeps for one parameter.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ParameterEntry {
    /// Numbers by name, such as the count of steps.
    pub scalars: Scalars,
    /// Tensors by name, such as the moments of Adam.
    pub tensors: BTreeMap<String, TensorEntry>,
}

/// A tensor in a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct TensorEntry {
    /// Dtype of the elements; `U32` for the words of codes.
    pub dtype: Dtype,
    /// Form of the codes; `None` where the elements are stored one by one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub codes: Option<StorageType>,
    /// Full shape of one copy, in elements.
    pub shape: Vec<usize>,
    /// Number of copies, stored one after another: 1, or the world size for an ignored parameter
    /// whose values differ between ranks.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub copies: usize,
    /// How tensor parallel ranks have split the tensor; `None` for a whole one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<SplitEntry>,
    /// The pieces that tile the flattened elements, or the words of the codes, of all copies, in
    /// order. Those of a split tensor tile the flattened elements of one part after the other.
    pub pieces: Vec<Piece>,
}

/// How tensor parallel ranks have split a tensor: in equal parts along one dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct SplitEntry {
    /// The dimension, from 0.
    pub dim: usize,
    /// Number of parts.
    pub parts: usize,
}

fn one() -> usize {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_one(copies: &usize) -> bool {
    *copies == 1
}

impl TensorEntry {
    /// Returns the number of elements of one copy; `None` where the shape overflows.
    pub fn numel(&self) -> Option<usize> {
        self.shape.iter().try_fold(1usize, |numel, &dim| numel.checked_mul(dim))
    }

    /// Returns the number of elements, or words of codes, of one copy; `None` where the shape
    /// overflows.
    pub fn stored_numel(&self) -> Option<usize> {
        let codes = self.codes.unwrap_or_default();
        self.numel()?.div_ceil(codes.record_len()).checked_mul(codes.record_words())
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(part: &usize) -> bool {
    *part == 0
}

/// A range of a flattened tensor's elements, or of the words of its codes, held in one rank's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Piece {
    /// The rank whose file holds the piece.
    pub file: usize,
    /// Number of the part of a split tensor, in whose elements the others are counted.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub part: usize,
    /// Index of the first element in the flattened tensor.
    pub start: usize,
    /// Index one past the last element in the flattened tensor.
    pub end: usize,
    /// CRC-32C of each [`BLOCK`] of the piece's bytes, in order.
    pub checksums: Vec<u32>,
}

impl Piece {
    /// Returns the range of elements in the flattened tensor.
    pub fn range(&self) -> Range<usize> {
        self.start..self.end
    }
}
