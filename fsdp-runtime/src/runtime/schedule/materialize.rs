//! The value of a parameter, as `Param::val()` returns it.

use burn::backend::{Autodiff, AutodiffBackend, TensorMetadata};
use burn::tensor::{DType, DispatchTensor, Shape};

use super::super::autodiff::{self, OpState};
use super::core::Schedule;
use super::state::State;
use super::unit_state::{LocalShard, ShardState};
use crate::backend::{
    Float, FloatTensor, ModelBackend, Raw, StorageDevice, StoredLeaf, StoredTensor, Tracked, cast,
};
use crate::error::{Error, ScheduleError};
use crate::layout::StorageType;
use crate::module::{CallId, ParamIndex};
use crate::param_group::{Placement, Unit};

impl<B: ModelBackend> Schedule<B> {
    /// Returns the full value of a parameter, given its base. The value is tracked if the parameter
    /// is trainable and the present forward records a graph.
    pub(super) fn materialize(
        &self,
        index: ParamIndex,
        base: DispatchTensor,
    ) -> Result<DispatchTensor, Error> {
        let (unit, _) = self.param(index);
        let Some((value, leaf, context)) =
            StoredTensor::from_dispatch(base.clone(), self.settings.storage)
        else {
            return Ok(base);
        };
        let base = LocalShard::new(value, leaf);
        let mut guard = self.lock();
        let state = &mut *guard;
        // A tied parameter takes value and leaf from the parameter that owns the weight.
        let owner = ParamIndex { param: unit.holder(index.param), ..index };
        if state.unloaded.contains(&owner) {
            return Err(self.not_loaded(owner));
        }
        let LocalShard { value, leaf, on_device, cast: whole, .. } =
            self.shard_of(state, index, owner, base)?;
        let spec = &unit.params[owner.param];
        if leaf.is_some() && !spec.is_trainable() {
            let (path, storage) = (spec.path.clone(), spec.storage);
            return Err(ScheduleError::FrozenStorage { path, storage }.into());
        }
        let call = state.units[index.unit].forwards.last().copied();
        let leaf = leaf_to_record(state, leaf);
        if leaf.is_none()
            && state.recompute.first_run.is_none()
            && let Some(call) = call.and_then(|call| state.calls.get_mut(&call))
        {
            call.reads_frozen |= unit.gathers && context.is_some();
        }
        if state.buffers.has_common(index.unit)
            && let Some(call) = call.and_then(|call| state.calls.get_mut(&call))
        {
            match (state.buffers.is_in_place(index.unit), &state.peers) {
                (true, Some(peers)) => call.peers = Some(peers.ranks.clone()),
                _ => call.views_ring = true,
            }
        }
        // Outside of any forward, a parameter has the dtype that the optimizer uses.
        let in_forward = state.open_forwards > 0;
        let dtype = if in_forward { spec.dtype } else { DType::F32 };
        let value = match &spec.placement {
            Placement::Shard(_) if !unit.gathers => self.whole_shard(value, owner),
            Placement::Shard(_) if call.is_some() => self.gathered(state, index, owner),
            Placement::Shard(_) if is_held_as(state, owner, dtype, unit) => {
                self.gathered(state, index, owner)
            }
            Placement::Shard(_) => {
                let full = self.gather_single(owner, self.on_device(value))?;
                B::raise(cast::<Raw<B>>(full, dtype))
            }
            _ => match (on_device.get(), whole) {
                (Some(copy), _) if copy.dtype() == dtype => B::raise(copy.clone()),
                (_, Some(copy)) if copy.dtype() == dtype => copy,
                _ => {
                    if self.settings.storage != StorageDevice::Device {
                        tracing::trace!(target: "fsdp", unit = %unit.name, "fsdp::copy_to_device");
                    }
                    let form = (spec.storage, &*spec.shape, dtype);
                    value.on_model_device(&self.device, form, self.settings.storage)
                }
            },
        };
        let value = match (leaf, context) {
            (_, None) => FloatTensor::Plain(value),
            (None, Some(context)) => {
                FloatTensor::Autodiff(Autodiff::<B>::from_inner(value), context)
            }
            (Some(leaf), Some(context)) => {
                FloatTensor::Autodiff(self.track(state, owner, call, &leaf, value), context)
            }
        };
        Ok(B::into_dispatch(value))
    }

    /// Returns the shard or the replicated parameter that the value of a parameter comes from.
    /// `base` is the parameter's own.
    fn shard_of(
        &self,
        state: &State<B>,
        index: ParamIndex,
        owner: ParamIndex,
        base: LocalShard<B>,
    ) -> Result<LocalShard<B>, Error> {
        let (unit, entry) = self.param(index);
        let unit_state = &state.units[index.unit];
        match &entry.placement {
            Placement::TiedTo(_) => match &unit_state.shards[owner.param] {
                Some(shard) => Ok(shard.clone()),
                None => {
                    let unit = unit.name.to_string();
                    Err(ScheduleError::NotRead { unit, path: entry.path.clone() }.into())
                }
            },
            // The unit has copied the parameter to the device, or cast it, for this forward.
            Placement::Replicated if !unit_state.forwards.is_empty() => {
                Ok(match &unit_state.shards[index.param] {
                    Some(shard) => LocalShard {
                        on_device: shard.on_device.clone(),
                        cast: shard.cast.clone(),
                        ..base
                    },
                    None => base,
                })
            }
            _ => Ok(base),
        }
    }

    /// Returns a shard that is a whole parameter, in the parameter's shape and without a copy.
    ///
    /// The graph refers to the shard until its backward. An optimizer that steps before that does
    /// not update the shard in place.
    fn whole_shard(&self, shard: StoredTensor<B>, owner: ParamIndex) -> Float<B> {
        let shape = &self.param(owner).1.shape;
        let form = (StorageType::F32, &**shape, DType::F32);
        let shard = shard.on_model_device(&self.device, form, self.settings.storage);
        B::float_reshape(shard, Shape::from(shape.clone()))
    }

    /// Returns the view of a gathered parameter in the gather buffer.
    fn gathered(&self, state: &State<B>, index: ParamIndex, owner: ParamIndex) -> Float<B> {
        let (unit, entry) = self.param(index);
        let shard_state = &state.units[index.unit].shard_state;
        debug_assert!(
            matches!(shard_state, ShardState::Unsharded),
            "{}: {shard_state:?}",
            unit.name,
        );
        let (range, offset) = unit.gathered_at(owner.param);
        B::raise(state.buffers.of_range(index.unit, range).view(offset, &entry.shape))
    }

    /// Records the gather of a trainable parameter, in the running call of the parameter's unit, or
    /// in a new call if there is none.
    fn track(
        &self,
        state: &mut State<B>,
        owner: ParamIndex,
        call: Option<CallId>,
        leaf: &StoredLeaf<B>,
        value: Float<B>,
    ) -> Tracked<B> {
        let is_new = call.is_none();
        let id = call.unwrap_or_else(|| self.open_call(state, owner.unit, Vec::new()));
        let call = state.calls.get_mut(&id).expect("the call was opened above or is still open");
        call.pending += 1;
        let alive = call.open.clone().expect("a call stays open while its forward runs");
        let op_state = OpState { hooks: self.this(), call: id, alive };
        let value = autodiff::gather(op_state, owner.param, leaf, &call.ordering_inputs, value);
        if is_new {
            call.open = None;
        }
        value
    }
}

/// Returns whether a guard keeps a parameter gathered in the given dtype.
fn is_held_as<B: ModelBackend>(
    state: &State<B>,
    index: ParamIndex,
    dtype: DType,
    unit: &Unit,
) -> bool {
    state.buffers.turns.holds(index.unit) && unit.params[index.param].dtype == dtype
}

/// Returns the leaf to record the use of a parameter with: none in the first run of a recomputed
/// forward, and a new one in the recomputation, whose graph is separate.
fn leaf_to_record<B: ModelBackend>(
    state: &State<B>,
    leaf: Option<StoredLeaf<B>>,
) -> Option<StoredLeaf<B>> {
    match (leaf, state.recompute.first_run, state.recompute.second_run) {
        (Some(_), Some(_), _) => None,
        (Some(leaf), None, Some(_)) => Some(leaf.with_new_node()),
        (leaf, ..) => leaf,
    }
}
