//! Optimizers with the state of a checkpoint.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use burn::optim::ModuleOptimizer;
use burn::tensor::Bytes;

use super::builder::LoadedOptimizer;
use super::target::Target;
use crate::checkpoint::manifest::{ParameterEntry, TensorEntry, optimizer_tensor_name};
use crate::checkpoint::optimizer_state::{self, NewParamState};
use crate::checkpoint::reader::CheckpointReader;
use crate::error::CheckpointError;

/// Returns a copy of `own` with this rank's part of the checkpoint's state, whose checksums it
/// verifies.
pub(super) fn load_optimizer(
    name: &str,
    own: &LoadedOptimizer<'_>,
    targets: &BTreeMap<&str, Vec<Target<'_>>>,
    reader: &Arc<CheckpointReader>,
) -> Result<ModuleOptimizer, CheckpointError> {
    let mut states = Vec::new();
    for (model, parameters) in &reader.manifest().optimizers[name].models {
        for target in targets.get(model.as_str()).into_iter().flatten() {
            let path = &target.spec.path;
            let Some(state) = parameters.get(path) else { continue };
            if !target.is_stepped(own.whole) {
                continue;
            }
            let ParameterEntry { scalars, tensors } = state;
            let mut new = NewParamState {
                id: target.id,
                path: path.clone(),
                rank: target.spec.shape.len(),
                scalars: scalars.clone(),
                tensors: Vec::new(),
            };
            for (tensor, stored) in tensors {
                let key = optimizer_tensor_name(name, model, path, tensor);
                let Some((ranges, shape)) = target.state_ranges(stored, own.whole) else {
                    continue;
                };
                reader.verify(&key, stored, &ranges)?;
                let stored = StoredRanges { reader: reader.clone(), key, tensor: stored, ranges };
                new.tensors.push(stored.deferred(tensor, shape));
            }
            states.push(new);
        }
    }
    optimizer_state::with_state(name, own.optimizer, states)
}

/// Verified ranges of a tensor in a checkpoint.
struct StoredRanges<'a> {
    reader: Arc<CheckpointReader>,
    /// The tensor's name in the ranks' files.
    key: String,
    tensor: &'a TensorEntry,
    ranges: Vec<Range<usize>>,
}

impl StoredRanges<'_> {
    /// Returns a tensor called `name` that is read from the checkpoint when a record is written.
    fn deferred(self, name: &str, shape: Vec<usize>) -> burn_pack::Tensor {
        let Self { reader, key, tensor, ranges } = self;
        let numel: usize = ranges.iter().map(|range| range.len()).sum();
        let (dtype, len) = (tensor.dtype.burn(), numel * tensor.dtype.size());
        let tensor = tensor.clone();
        let read = move || {
            let mut bytes = vec![0; len];
            reader
                .read(&key, &tensor, &ranges, &mut bytes)
                .map_err(|error| burn_pack::Error::IoError(error.to_string()))?;
            Ok(Bytes::from_bytes_vec(bytes))
        };
        burn_pack::Tensor::deferred(name.to_string(), dtype, shape, None, len, read)
    }
}
