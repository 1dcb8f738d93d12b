//! Taking state dicts of models.

use std::collections::BTreeMap;

use burn::tensor::{DType, DispatchTensor, TensorData};
use fsdp_kernels::codes::decoded_elements;

use super::layout::LocalLayout;
use super::options::StateDictOptions;
use super::recipient::Recipient;
use super::selection::Selection;
use super::tensors::{FullState, LocalState, ShardedState, ShardedTensor, copied_data, reshaped};
use crate::checkpoint::ranks::{Ranks, SAVE_WHOLE};
use crate::checkpoint::sharded_model::{LocalParam, ShardedModel, ignored_values, with_host_bytes};
use crate::checkpoint::state::State;
use crate::error::{Error, raise};
use crate::fully_shard::Fsdp;
use crate::module::FsdpModule;
use crate::param_group::{ParamSpec, Placement};

impl<M: FsdpModule> State<'_, M> {
    /// Returns this rank's elements of every parameter. Codes are decoded to f32.
    ///
    /// # Panics
    ///
    /// Unwinds with [`ShardError::SplitMatrices`](crate::errors::ShardError::SplitMatrices), which `launch`
    /// returns, if tensor parallel ranks have parts of the parameters.
    pub fn sharded(&self) -> ShardedState {
        self.shards(&Selection::all(self.model))
    }

    /// Returns this rank's elements of the parameters that `options` select. Codes are decoded to
    /// f32. Every rank calls it, with equal options.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Filter`](crate::errors::CheckpointError::Filter) where the filter does not fit
    /// the model, [`CheckpointError::RanksDiffer`](crate::errors::CheckpointError::RanksDiffer) where ranks
    /// have other options, and [`CollectiveError`](crate::errors::CollectiveError) when another rank does
    /// not take part in time.
    pub fn sharded_with(&self, options: &StateDictOptions) -> Result<ShardedState, Error> {
        let ranks = Ranks::from(self.model);
        let selection = Selection::agreed(self.model, &ranks, options, None)?;
        Ok(self.shards(&selection))
    }

    fn shards(&self, selection: &Selection) -> ShardedState {
        let whole = self.model.schedule.check_whole("a state dict of shards", SAVE_WHOLE);
        whole.unwrap_or_else(|error| raise(error.into()));
        let mut state = BTreeMap::new();
        for_each_host_bytes(self.model, selection, &mut |spec, dtype, bytes| {
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
        for_each_host_bytes(self.model, &Selection::all(self.model), &mut |spec, dtype, bytes| {
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
    /// [`CollectiveError`](crate::errors::CollectiveError) when another rank does not take part in time,
    /// and [`ShardError::InvalidOption`](crate::errors::ShardError::InvalidOption) for a recipient outside
    /// of this world.
    pub fn full(&self, recipient: Recipient) -> Result<FullState, Error> {
        recipient.check(self.model.schedule.world_mesh().world)?;
        self.gather_full(recipient, &Selection::all(self.model))
    }

    /// Gathers the full parameters that `options` select to one rank or to all, as
    /// [`full`](Self::full) does. Every rank calls it, with equal options.
    ///
    /// # Errors
    ///
    /// Those of [`full`](Self::full), [`CheckpointError::Filter`](crate::errors::CheckpointError::Filter)
    /// where the filter does not fit the model, and
    /// [`CheckpointError::RanksDiffer`](crate::errors::CheckpointError::RanksDiffer) where ranks have other
    /// options.
    pub fn full_with(
        &self,
        recipient: Recipient,
        options: &StateDictOptions,
    ) -> Result<FullState, Error> {
        let ranks = Ranks::from(self.model);
        let selection = Selection::agreed(self.model, &ranks, options, Some(recipient))?;
        self.gather_full(recipient, &selection)
    }

    fn gather_full(&self, recipient: Recipient, selection: &Selection) -> Result<FullState, Error> {
        let keep = recipient.is(self.model.schedule.world_mesh().rank);
        let (mut state, mut outcome) = (BTreeMap::new(), Ok(()));
        self.model.for_each_param(&mut |LocalParam { index, base, .. }| {
            if outcome.is_err() || !selection.contains(index) {
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

/// Calls `f` with the description and dtype of each selected parameter, and with the stored
/// elements as bytes in host memory.
fn for_each_host_bytes(
    model: &dyn ShardedModel,
    selection: &Selection,
    f: &mut dyn FnMut(&ParamSpec, DType, &[u8]),
) {
    model.for_each_param(&mut |param| {
        if !selection.contains(param.index) {
            return;
        }
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
