//! Taking and loading state dicts of models.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use burn::tensor::{DType, DispatchTensor, TensorData};

use super::compare::{Comparison, compare_names};
use super::layout::{LocalLayout, difference};
use super::recipient::Recipient;
use super::tensors::{FullState, LocalState, ShardedState, ShardedTensor, copied_data, reshaped};
use crate::backend::codes::{decoded_elements, needs_matrix, stored_data, widened_elements};
use crate::checkpoint::ranks::Ranks;
use crate::checkpoint::sharded_model::{LocalParam, ShardedModel, ignored_values, with_host_bytes};
use crate::checkpoint::state::{State, StateMut};
use crate::error::{CheckpointError, Error};
use crate::fully_shard::Fsdp;
use crate::layout::StorageType;
use crate::module::{FsdpModule, ParamIndex};
use crate::param_group::{ParamSpec, Placement};

impl<M: FsdpModule> State<'_, M> {
    /// Returns this rank's elements of every parameter. Codes are decoded to f32.
    pub fn sharded(&self) -> ShardedState {
        let mut state = BTreeMap::new();
        for_each_host_bytes(self.model, &mut |spec, dtype, bytes| {
            let range = spec.range();
            let data = match spec.storage.codes() {
                Some(codes) => {
                    let elements = decoded_elements(bytes, codes, range.len());
                    TensorData::new(elements, vec![range.len()])
                }
                None => copied_data(&bytes[..range.len() * dtype.size()], vec![range.len()], dtype),
            };
            let shape = spec.shape.clone();
            state.insert(spec.path.clone(), ShardedTensor { shape, range, data });
        });
        ShardedState(state)
    }

    /// Returns this rank's part of every parameter in the shape in which the rank stores it. Codes are
    /// elements with the bits of their words.
    pub fn local(&self) -> LocalState {
        let mut tensors = BTreeMap::new();
        for_each_host_bytes(self.model, &mut |spec, dtype, bytes| {
            tensors.insert(spec.path.clone(), copied_data(bytes, spec.base_shape(), dtype));
        });
        LocalState { layout: LocalLayout::of(self.model), tensors }
    }

    /// Gathers the full parameters to one rank or to all. Every rank calls it. A rank that does not
    /// receive them needs memory for one full parameter at a time. Ignored parameters and running
    /// statistics, of which each rank has its own values, are rank 0's.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`](crate::CollectiveError) when another rank does not take part in time,
    /// and [`ShardError::InvalidOption`](crate::ShardError::InvalidOption) for a recipient outside
    /// of this world.
    pub fn full(&self, recipient: Recipient) -> Result<FullState, Error> {
        recipient.check(self.model.mesh().world)?;
        let keep = recipient.is(self.model.mesh().rank);
        let (mut state, mut outcome) = (BTreeMap::new(), Ok(()));
        self.model.for_each_param(&mut |LocalParam { index, base, .. }| {
            if outcome.is_err() {
                return;
            }
            let spec = self.model.spec(index);
            let full = match spec.placement {
                Placement::PerRank => rank_0_values(self.model, spec, base, keep),
                _ => self.model.schedule.full(index, base, keep),
            };
            match full {
                Ok(Some(data)) => _ = state.insert(spec.path.clone(), data),
                Ok(None) => {}
                Err(error) => outcome = Err(error),
            }
        });
        outcome.map(|()| FullState(state))
    }
}

impl<M: FsdpModule> StateMut<'_, M> {
    /// Loads this rank's elements of every parameter.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StateMismatch`] with every difference; the model is unchanged. Scales that
    /// are quantised depend on all elements of a parameter: load such a model with
    /// [`load_full`](Self::load_full) or [`load_local`](Self::load_local).
    pub fn load_sharded(&mut self, state: &ShardedState) -> Result<(), CheckpointError> {
        compare_names(self.model, state.keys(), |spec, dtype| {
            let Some(tensor) = state.get(&spec.path) else { return Comparison::Missing };
            difference("shape", &tensor.shape, &spec.shape)
                .or_else(|| difference("elements", &tensor.range, &spec.range()))
                .or_else(|| {
                    let len = vec![tensor.range.len()];
                    difference("data", &tensor.data.shape().as_slice().to_vec(), &len)
                })
                .or_else(|| difference("dtype", &tensor.data.dtype(), &dtype))
                .or_else(|| needs_matrix(spec.storage).then(|| needs_full(spec)))
                .into()
        })?;
        self.model.replace_values(&mut |_, spec, dtype| {
            let bytes = state.get(&spec.path)?.data.as_bytes();
            Some(match spec.storage.codes() {
                Some(_) => stored_part(bytes, dtype, spec.range(), spec)?,
                None => copied_data(bytes, spec.base_shape(), dtype),
            })
        });
        Ok(())
    }

    /// Loads a state that this rank took with [`State::local`].
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StateMismatch`] where the layout differs; the model is unchanged.
    pub fn load_local(&mut self, state: &LocalState) -> Result<(), CheckpointError> {
        state.layout.check(&LocalLayout::of(self.model))?;
        self.model.replace_values(&mut |_, spec, _| state.tensors.get(&spec.path).cloned());
        Ok(())
    }

    /// Loads full parameters that one rank or all ranks provide; the others pass an empty state.
    /// Every rank calls it and needs memory for one full parameter at a time.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StateMismatch`] with every difference on the ranks that provide the
    /// state, and [`CollectiveError`](crate::CollectiveError) on the others; the model is
    /// unchanged.
    pub fn load_full(&mut self, state: &FullState, from: Recipient) -> Result<(), Error> {
        from.check(self.model.mesh().world)?;
        let ranks = Ranks::from(&*self.model);
        let provides = from.is(self.model.mesh().rank);
        let compared = match provides {
            true => compare_names(self.model, state.keys(), |spec, dtype| {
                state.get(&spec.path).map_or(Comparison::Missing, |data| {
                    difference("shape", &data.shape().as_slice().to_vec(), &spec.shape)
                        .or_else(|| {
                            let is_f32 = spec.storage == StorageType::F32;
                            let expected = if is_f32 { dtype } else { DType::F32 };
                            difference("dtype", &data.dtype(), &expected)
                        })
                        .into()
                })
            }),
            false => Ok(()),
        };
        ranks.agree("a full state", compared)?;
        let mut indices = Vec::new();
        self.model.for_each_param(&mut |param| indices.push(param.index));
        let mut shards: HashMap<ParamIndex, TensorData> = HashMap::new();
        for index in indices {
            let spec = self.model.spec(index);
            let mut keep_shard = |data: &TensorData| {
                if !spec.range().is_empty() {
                    let needed = match needs_matrix(spec.storage) {
                        true => 0..spec.numel(),
                        false => spec.range(),
                    };
                    let size = data.dtype().size();
                    let bytes = &data.as_bytes()[needed.start * size..needed.end * size];
                    let shard = match spec.storage {
                        StorageType::F32 => {
                            Some(copied_data(bytes, spec.base_shape(), data.dtype()))
                        }
                        _ => stored_part(bytes, data.dtype(), needed, spec),
                    };
                    shards.extend(shard.map(|shard| (index, shard)));
                }
            };
            let own = state.get(&spec.path).filter(|_| provides);
            match from {
                Recipient::All => own.into_iter().for_each(keep_shard),
                Recipient::Only(provider) => {
                    let what = format!("`{}` of a full state", spec.path);
                    let all = ranks.exchange(&what, own.cloned())?;
                    all[provider.index()].iter().for_each(&mut keep_shard);
                }
            }
        }
        self.model.replace_values(&mut |index, _, _| shards.remove(&index));
        Ok(())
    }
}

/// Describes why a parameter cannot be loaded from a part of its elements.
fn needs_full(spec: &ParamSpec) -> String {
    format!("{} needs all elements; load a full or a local state", spec.storage)
}

/// Returns what this rank stores of a parameter, given elements `given` of it, as bytes. Returns `None`
/// for a dtype that is no float, which was refused before.
fn stored_part(
    bytes: &[u8],
    dtype: DType,
    given: Range<usize>,
    spec: &ParamSpec,
) -> Option<TensorData> {
    let elements = widened_elements(bytes, dtype)?;
    debug_assert_eq!(elements.len(), given.len());
    Some(stored_data(elements, &spec.range(), spec.storage, spec.base_shape()))
}

/// Calls `f` with the description and dtype of each parameter, and with the stored elements as
/// bytes in host memory.
fn for_each_host_bytes(model: &dyn ShardedModel, f: &mut dyn FnMut(&ParamSpec, DType, &[u8])) {
    model.for_each_param(&mut |param| {
        let (spec, dtype) = (model.spec(param.index), param.dtype);
        with_host_bytes(&**model.schedule(), spec, param.base, &mut |bytes| f(spec, dtype, bytes));
    });
}

/// Returns rank 0's values of an ignored parameter if `keep` is set. Every rank calls it.
fn rank_0_values<M>(
    model: &Fsdp<M>,
    spec: &ParamSpec,
    base: DispatchTensor,
    keep: bool,
) -> Result<Option<TensorData>, Error> {
    let ranks = Ranks::from(model);
    let what = format!("`{}` of a full state", spec.path);
    let own = ranks.leads().then(|| reshaped(ignored_values(base), spec.shape.clone()));
    let all = ranks.exchange(&what, own)?;
    Ok((*all[0]).clone().filter(|_| keep))
}
