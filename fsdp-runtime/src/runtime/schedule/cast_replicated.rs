//! Casts of a unit's replicated parameters and their gradients, several in one kernel launch.
//!
//! Replicated parameters are small and many: the vectors of a unit. Cast one by one, at each
//! `val()`, they cost a launch each.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use fsdp_kernels::takes;

use super::core::Schedule;
use super::state::State;
use crate::backend::{
    Float, ModelBackend, Raw, ShardBackend, StorageDevice, StoredTensor, cast_all_model,
};
use crate::param_group::Placement;

impl<B: ModelBackend> Schedule<B> {
    /// Casts the replicated parameters of a unit to the dtypes that compute, for one forward.
    ///
    /// In host memory nothing is launched, so [`val()`](Self::materialize) casts a parameter when it
    /// is read.
    pub(super) fn cast_replicated(&self, state: &mut State<B>, index: usize) {
        if Raw::<B>::IN_HOST_MEMORY || self.settings.storage != StorageDevice::Device {
            return;
        }
        let entries = &self.units[index].params;
        let shards = &mut state.units[index].shards;
        let mut values = Vec::new();
        for (at, (entry, shard)) in entries.iter().zip(shards.iter()).enumerate() {
            // Codes are decoded when they are read.
            let is_cast_here =
                entry.placement == Placement::Replicated && !entry.storage.is_coded();
            let Some(shard) = shard.as_ref().filter(|_| is_cast_here) else { continue };
            #[allow(clippy::infallible_destructuring_match, reason = "`flex` adds a variant")]
            let value = match &shard.value {
                StoredTensor::Device(value) => value,
                #[cfg(feature = "flex")]
                StoredTensor::Host(_) => continue,
            };
            if is_cast(value.dtype(), entry.dtype) {
                values.push((at, entry.dtype, value.clone()));
            }
        }
        for (at, cast) in cast_all::<B>(values) {
            if let Some(shard) = &mut shards[at] {
                shard.cast = Some(cast);
            }
        }
    }

    /// Casts the gradients of a unit's replicated parameters to the dtypes of the reduction, except
    /// those that the reduction reads as they are.
    pub(super) fn cast_replicated_gradients(
        &self,
        index: usize,
        gradients: &mut [Option<Float<B>>],
    ) {
        if Raw::<B>::IN_HOST_MEMORY {
            return;
        }
        let mut values = Vec::new();
        for (at, (entry, gradient)) in self.units[index].params.iter().zip(&*gradients).enumerate()
        {
            let Some(gradient) = gradient else { continue };
            let (found, wanted) = (gradient.dtype(), entry.reduce_dtype);
            let is_replicated = entry.placement == Placement::Replicated;
            if is_replicated && is_cast(found, wanted) && !self.reduces_as(found, wanted) {
                values.push((at, wanted, gradient.clone()));
            }
        }
        for (at, cast) in cast_all::<B>(values) {
            gradients[at] = Some(cast);
        }
    }
}

/// Returns whether a tensor of dtype `found` needs a cast to `wanted` that the kernels know.
fn is_cast(found: DType, wanted: DType) -> bool {
    found != wanted && takes(found) && takes(wanted)
}

/// Casts tensors, each given with an index and a dtype. Those of one dtype share launches.
fn cast_all<B: ModelBackend>(mut tensors: Vec<(usize, DType, Float<B>)>) -> Vec<(usize, Float<B>)> {
    let mut casts = Vec::new();
    while let Some(&(_, dtype, _)) = tensors.first() {
        let (of_dtype, others): (Vec<_>, Vec<_>) =
            tensors.into_iter().partition(|(_, other, _)| *other == dtype);
        let (indices, values): (Vec<_>, Vec<_>) =
            of_dtype.into_iter().map(|(index, _, value)| (index, value)).unzip();
        casts.extend(indices.into_iter().zip(cast_all_model::<B>(values, dtype)));
        tensors = others;
    }
    casts
}
