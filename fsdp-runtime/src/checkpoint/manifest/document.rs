//! The manifest as a whole.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::entries::{BLOCK, ModelEntry, OptimizerEntry, Progress, TensorEntry};
use super::names::{model_tensor_name, optimizer_tensor_name};
use crate::checkpoint::scalar::Scalars;
use crate::layout::WorldSize;

/// Value of every manifest's `format` field.
pub(super) const FORMAT: &str = "fsdp-burn checkpoint";
/// The latest format version that this crate reads: that of a checkpoint with split tensors.
pub const VERSION: u64 = 4;
/// The format version of a checkpoint of whole tensors.
const WHOLE: u64 = 3;

/// Everything in a checkpoint but the elements of tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Manifest {
    pub(super) format: String,
    pub(super) version: u64,
    /// Number of ranks that wrote the checkpoint; each wrote one file.
    pub world_size: usize,
    /// Size of each rank's file in bytes, in rank order.
    pub files: Vec<u64>,
    /// Number of bytes that one CRC-32C covers.
    pub checksum_block: u64,
    /// Position of the training run when the checkpoint was saved.
    pub progress: Progress,
    /// Parameters, units and tensors of each model, by the model's name.
    pub models: BTreeMap<String, ModelEntry>,
    /// State of each optimizer, by the optimizer's name.
    pub optimizers: BTreeMap<String, OptimizerEntry>,
    /// State of the learning-rate schedulers, by name.
    pub schedulers: BTreeMap<String, Scalars>,
    /// State of the loss scalers, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub scalers: BTreeMap<String, Scalars>,
    /// Values that the program added, by name, each as JSON text.
    pub values: BTreeMap<String, String>,
}

impl Manifest {
    /// Returns a manifest without models, for a checkpoint written by `world` ranks.
    pub(in crate::checkpoint) fn new(world: WorldSize, progress: Progress) -> Self {
        Self {
            format: FORMAT.into(),
            version: WHOLE,
            world_size: world.size(),
            files: vec![0; world.size()],
            checksum_block: BLOCK as u64,
            progress,
            models: BTreeMap::new(),
            optimizers: BTreeMap::new(),
            schedulers: BTreeMap::new(),
            scalers: BTreeMap::new(),
            values: BTreeMap::new(),
        }
    }

    /// Says that tensors may be split.
    pub(in crate::checkpoint) fn allow_splits(&mut self) {
        self.version = VERSION;
    }

    /// Returns every tensor of models and optimizers, with the tensor's name in the ranks' files.
    pub fn tensors(&self) -> impl Iterator<Item = (String, &TensorEntry)> {
        let models = self.models.iter().flat_map(|(model, entry)| {
            entry.tensors.iter().map(move |(path, tensor)| (model_tensor_name(model, path), tensor))
        });
        let optimizers = self.optimizers.iter().flat_map(|(optimizer, entry)| {
            entry.models.iter().flat_map(move |(model, parameters)| {
                parameters.iter().flat_map(move |(path, parameter)| {
                    parameter.tensors.iter().map(move |(name, tensor)| {
                        (optimizer_tensor_name(optimizer, model, path, name), tensor)
                    })
                })
            })
        });
        models.chain(optimizers)
    }
}
