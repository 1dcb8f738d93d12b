//! Loading state dicts into models.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use burn::tensor::{DType, TensorData};
use fsdp_kernels::codes::{needs_matrix, stored_data, widened_elements};

use super::compare::{Comparison, compare_names};
use super::layout::{LocalLayout, difference};
use super::options::StateDictOptions;
use super::recipient::Recipient;
use super::report::Found;
use super::selection::Selection;
use super::tensors::{FullState, LocalState, ShardedState, copied_data};
use crate::checkpoint::load_report::LoadReport;
use crate::checkpoint::ranks::Ranks;
use crate::checkpoint::sharded_model::ShardedModel;
use crate::checkpoint::state::StateMut;
use crate::error::{CheckpointError, Error};
use crate::layout::StorageType;
use crate::module::{FsdpModule, ParamIndex};
use crate::param_group::ParamSpec;

/// Name of a full state in the errors of collectives.
const FULL: &str = "a full state";
/// Name of a sharded state in the errors of collectives.
const SHARDED: &str = "a sharded state";

impl<M: FsdpModule> StateMut<'_, M> {
    /// Loads this rank's elements of every parameter.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StateMismatch`] with every difference; the model is unchanged. Scales
    /// that are quantised depend on all elements of a parameter: load such a model with
    /// [`load_full`](Self::load_full) or [`load_local`](Self::load_local).
    pub fn load_sharded(&mut self, state: &ShardedState) -> Result<(), CheckpointError> {
        let selection = Selection::all(self.model);
        compare_sharded(self.model, state, &selection)?;
        let all = selection.without(self.model, &[]);
        self.replace_sharded(state, &all);
        Ok(())
    }

    /// Loads this rank's elements of the parameters that `options` select. Every rank calls it,
    /// with equal options and with its own state. All other parameters keep their values.
    ///
    /// # Errors
    ///
    /// Those of [`load_sharded`](Self::load_sharded) on the ranks that found them, and
    /// [`CollectiveError::PeerFailed`](crate::errors::CollectiveError::PeerFailed) on the others; the model
    /// is unchanged on all ranks. Missing and unexpected keys are no error with
    /// [`with_strict(false)`](StateDictOptions::with_strict), unless a parameter is missing on some
    /// ranks only. [`CheckpointError::Filter`] where the filter does not fit the model, and
    /// [`CheckpointError::RanksDiffer`] where ranks have other options.
    pub fn load_sharded_with(
        &mut self,
        state: &ShardedState,
        options: &StateDictOptions,
    ) -> Result<LoadReport, Error> {
        let ranks = Ranks::from(&*self.model);
        let selection = Selection::agreed(self.model, &ranks, options, None)?;
        let found = ranks.agree(SHARDED, compare_sharded(self.model, state, &selection))?;
        let report = found.report(&ranks, SHARDED)?;
        let loaded = selection.without(self.model, &report.missing);
        self.replace_sharded(state, &loaded);
        Ok(report)
    }

    /// Replaces this rank's elements of the parameters `loaded` by those of a state that fits.
    fn replace_sharded(&mut self, state: &ShardedState, loaded: &HashSet<ParamIndex>) {
        self.model.replace_values(loaded, &mut |_, spec, dtype| {
            let bytes = state.get(&spec.path)?.data.as_bytes();
            Some(match spec.storage.codes() {
                Some(_) => stored_part(bytes, dtype, spec.range(), spec)?,
                None => copied_data(bytes, spec.base_shape(), dtype),
            })
        });
    }

    /// Loads a state that this rank took with [`State::local`](crate::checkpoint::State::local).
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StateMismatch`] where the layout differs; the model is unchanged.
    pub fn load_local(&mut self, state: &LocalState) -> Result<(), CheckpointError> {
        state.layout.check(&LocalLayout::of(self.model))?;
        let all = Selection::all(self.model).without(self.model, &[]);
        self.model.replace_values(&all, &mut |_, spec, _| state.tensors.get(&spec.path).cloned());
        Ok(())
    }

    /// Loads full parameters that one rank or all ranks provide; the others pass an empty state.
    /// Every rank calls it and needs memory for one full parameter at a time.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StateMismatch`] with every difference on the ranks that provide the
    /// state, and [`CollectiveError`](crate::errors::CollectiveError) on the others; the model is
    /// unchanged.
    pub fn load_full(&mut self, state: &FullState, from: Recipient) -> Result<(), Error> {
        from.check(self.model.mesh().world)?;
        let ranks = Ranks::from(&*self.model);
        let selection = Selection::all(self.model);
        ranks.agree(FULL, self.compare_full(state, from, &selection))?;
        let all = selection.without(self.model, &[]);
        self.replace_full(state, from, &ranks, &all)
    }

    /// Loads the full parameters that `options` select, as [`load_full`](Self::load_full) does.
    /// Every rank calls it, with equal options. All other parameters keep their values. The report
    /// is the same on every rank.
    ///
    /// # Errors
    ///
    /// Those of [`load_full`](Self::load_full). Missing and unexpected keys are no error with
    /// [`with_strict(false)`](StateDictOptions::with_strict), unless several ranks provide states
    /// and a parameter is missing in some of them only. [`CheckpointError::Filter`] where the
    /// filter does not fit the model, and [`CheckpointError::RanksDiffer`] where ranks have other
    /// options.
    pub fn load_full_with(
        &mut self,
        state: &FullState,
        from: Recipient,
        options: &StateDictOptions,
    ) -> Result<LoadReport, Error> {
        let ranks = Ranks::from(&*self.model);
        let selection = Selection::agreed(self.model, &ranks, options, Some(from))?;
        let found = ranks.agree(FULL, self.compare_full(state, from, &selection))?;
        let report = found.report(&ranks, FULL)?;
        let loaded = selection.without(self.model, &report.missing);
        self.replace_full(state, from, &ranks, &loaded)?;
        Ok(report)
    }

    /// Compares a full state with the selected parameters, on the ranks that provide it.
    fn compare_full(
        &self,
        state: &FullState,
        from: Recipient,
        selection: &Selection,
    ) -> Result<Found, CheckpointError> {
        if !from.is(self.model.mesh().rank) {
            return Ok(Found::default());
        }
        compare_names(self.model, selection, state.keys(), |spec, dtype| {
            state.get(&spec.path).map_or(Comparison::Missing, |data| {
                difference("shape", &data.shape().as_slice().to_vec(), &spec.shape)
                    .or_else(|| {
                        let is_f32 = spec.storage == StorageType::F32;
                        let expected = if is_f32 { dtype } else { DType::F32 };
                        difference("dtype", &data.dtype(), &expected)
                    })
                    .into()
            })
        })
    }

    /// Replaces the parameters `loaded` by those of a full state that fits. Every rank calls it,
    /// with equal `loaded`.
    fn replace_full(
        &mut self,
        state: &FullState,
        from: Recipient,
        ranks: &Ranks,
        loaded: &HashSet<ParamIndex>,
    ) -> Result<(), Error> {
        let provides = from.is(self.model.mesh().rank);
        let mut indices = Vec::new();
        self.model.for_each_param(&mut |param| indices.push(param.index));
        indices.retain(|index| loaded.contains(index));
        let mut shards: HashMap<ParamIndex, TensorData> = HashMap::new();
        for index in indices {
            let spec = self.model.spec(index);
            let own = state.get(&spec.path).filter(|_| provides);
            let shard = match from {
                Recipient::All => own.and_then(|full| shard_of(full, spec)),
                Recipient::Only(provider) => {
                    let what = format!("`{}` of a full state", spec.path);
                    let all = ranks.exchange(&what, own.cloned())?;
                    (*all[provider.index()]).as_ref().and_then(|full| shard_of(full, spec))
                }
            };
            shards.extend(shard.map(|shard| (index, shard)));
        }
        self.model.replace_values(loaded, &mut |index, _, _| shards.remove(&index));
        Ok(())
    }
}

/// Compares this rank's part of a state with the selected parameters.
fn compare_sharded(
    model: &dyn ShardedModel,
    state: &ShardedState,
    selection: &Selection,
) -> Result<Found, CheckpointError> {
    compare_names(model, selection, state.keys(), |spec, dtype| {
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
    })
}

/// Returns what this rank stores of a parameter, given the full one. `None` for an empty shard.
fn shard_of(full: &TensorData, spec: &ParamSpec) -> Option<TensorData> {
    if spec.range().is_empty() {
        return None;
    }
    let needed = match needs_matrix(spec.storage) {
        true => 0..spec.numel(),
        false => spec.range(),
    };
    let size = full.dtype().size();
    let bytes = &full.as_bytes()[needed.start * size..needed.end * size];
    match spec.storage {
        StorageType::F32 => Some(copied_data(bytes, spec.base_shape(), full.dtype())),
        _ => stored_part(bytes, full.dtype(), needed, spec),
    }
}

/// Describes why a parameter cannot be loaded from a part of its elements.
fn needs_full(spec: &ParamSpec) -> String {
    format!("{} needs all elements; load a full or a local state", spec.storage)
}

/// Returns what this rank stores of a parameter, given elements `given` of it, as bytes. Returns
/// `None` for a dtype that is no float, which was refused before.
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
