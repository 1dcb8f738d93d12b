//! Taking and loading state dicts of optimizers. Tensors of the parameter's shape, such as moments,
//! are sharded as the parameter is.

use std::ops::Range;

use burn::optim::ModuleOptimizer;
use burn::tensor::TensorData;

use super::layout::{LocalLayout, difference};
use super::optimizer_gather::gather_state;
use super::optimizer_local::{read_local_state, with_local_state};
use super::optimizer_tensors::{LocalTensor, OptimizerState};
use super::options::StateDictOptions;
use super::recipient::Recipient;
use super::report::Found;
use super::selection::Selection;
use super::tensors::{ShardedTensor, copied_data};
use crate::checkpoint::load_report::LoadReport;
use crate::checkpoint::optimizer_state::StateTensor;
use crate::checkpoint::ranks::{Ranks, SAVE_WHOLE};
use crate::checkpoint::state::State;
use crate::error::{CheckpointError, Error, raise};
use crate::fully_shard::Fsdp;
use crate::module::{FsdpModule, ParamIndex};
use crate::optim::{WholeParam, owners};
use crate::param_group::{ParamSpec, Placement};

/// Name of an optimizer's state in the errors of collectives.
const WHAT: &str = "an optimizer's state";

impl<M: FsdpModule> State<'_, M> {
    /// Returns this rank's elements of an optimizer's state.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NotElementwise`] for state that cannot be sharded.
    ///
    /// # Panics
    ///
    /// As [`sharded`](Self::sharded).
    pub fn sharded_optimizer(
        &self,
        optimizer: &ModuleOptimizer,
    ) -> Result<OptimizerState<ShardedTensor>, CheckpointError> {
        let whole = self.model.schedule.check_whole("a state dict of shards", SAVE_WHOLE);
        whole.unwrap_or_else(|error| raise(error.into()));
        read_local_state(self.model, optimizer, &Selection::all(self.model), sharded_tensor)
    }

    /// Returns this rank's elements of an optimizer's state for the parameters that `options`
    /// select. Every rank calls it, with equal options.
    ///
    /// # Errors
    ///
    /// Those of [`sharded_optimizer`](Self::sharded_optimizer) on the ranks that found them, and
    /// [`CollectiveError::PeerFailed`](crate::errors::CollectiveError::PeerFailed) on the others.
    /// [`CheckpointError::Filter`] where the filter does not fit the model, and
    /// [`CheckpointError::RanksDiffer`] where ranks have other options.
    pub fn sharded_optimizer_with(
        &self,
        optimizer: &ModuleOptimizer,
        options: &StateDictOptions,
    ) -> Result<OptimizerState<ShardedTensor>, Error> {
        let ranks = Ranks::from(self.model);
        let selection = Selection::agreed(self.model, &ranks, options, None)?;
        let state = read_local_state(self.model, optimizer, &selection, sharded_tensor);
        ranks.agree(WHAT, state)
    }

    /// Returns this rank's part of an optimizer's state in the shapes in which the rank stores it.
    /// It can be loaded only in the same layout.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Record`] for state that Burn cannot convert to a record.
    pub fn local_optimizer(
        &self,
        optimizer: &ModuleOptimizer,
    ) -> Result<OptimizerState<LocalTensor>, CheckpointError> {
        let all = Selection::all(self.model);
        let state = read_local_state(self.model, optimizer, &all, |_, tensor| {
            Ok(LocalTensor(tensor.into_data()))
        })?;
        Ok(OptimizerState { layout: Some(LocalLayout::of(self.model)), ..state })
    }

    /// Gathers an optimizer's full state to one rank or to all. Every rank calls it. A rank that
    /// does not receive the state needs memory for one full tensor at a time.
    ///
    /// # Errors
    ///
    /// Those of [`sharded_optimizer`](Self::sharded_optimizer), and
    /// [`CollectiveError`](crate::errors::CollectiveError) when another rank does not take part in time.
    pub fn full_optimizer(
        &self,
        optimizer: &ModuleOptimizer,
        recipient: Recipient,
    ) -> Result<OptimizerState<TensorData>, Error> {
        gather_state(self.model, optimizer, recipient, false, &Selection::all(self.model))
    }

    /// Gathers an optimizer's full state for the parameters that `options` select to one rank or to
    /// all, as [`full_optimizer`](Self::full_optimizer) does. Every rank calls it, with equal
    /// options.
    ///
    /// # Errors
    ///
    /// Those of [`full_optimizer`](Self::full_optimizer), [`CheckpointError::Filter`] where the
    /// filter does not fit the model, and [`CheckpointError::RanksDiffer`] where ranks have other
    /// options.
    pub fn full_optimizer_with(
        &self,
        optimizer: &ModuleOptimizer,
        recipient: Recipient,
        options: &StateDictOptions,
    ) -> Result<OptimizerState<TensorData>, Error> {
        let ranks = Ranks::from(self.model);
        let selection = Selection::agreed(self.model, &ranks, options, Some(recipient))?;
        gather_state(self.model, optimizer, recipient, false, &selection)
    }

    /// Loads this rank's elements of an optimizer's state.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StateMismatch`] with every difference; the optimizer is unchanged.
    pub fn load_sharded_optimizer(
        &self,
        optimizer: &mut ModuleOptimizer,
        state: &OptimizerState<ShardedTensor>,
    ) -> Result<(), CheckpointError> {
        let all = Selection::all(self.model);
        let loaded =
            with_local_state(self.model, optimizer, state, &all, is_stored, part_of_sharded)?;
        *optimizer = loaded.0;
        Ok(())
    }

    /// Loads this rank's elements of an optimizer's state for the parameters that `options` select.
    /// Every rank calls it, with equal options and with its own state. The optimizer keeps its
    /// state of all other parameters.
    ///
    /// The report lists trained parameters without state as missing. This is no error, since an
    /// optimizer has no state before its first step. Under `with_strict(false)` the optimizer keeps
    /// its state of them, otherwise it has none afterwards.
    ///
    /// # Errors
    ///
    /// Those of [`load_sharded_optimizer`](Self::load_sharded_optimizer) on the ranks that found
    /// them, and [`CollectiveError::PeerFailed`](crate::errors::CollectiveError::PeerFailed) on the others;
    /// the optimizer is unchanged on all ranks. [`CheckpointError::StateMismatch`] where some
    /// ranks' states lack a parameter that others have. [`CheckpointError::Filter`] where the
    /// filter does not fit the model, and [`CheckpointError::RanksDiffer`] where ranks have other
    /// options.
    pub fn load_sharded_optimizer_with(
        &self,
        optimizer: &mut ModuleOptimizer,
        state: &OptimizerState<ShardedTensor>,
        options: &StateDictOptions,
    ) -> Result<LoadReport, Error> {
        let ranks = Ranks::from(self.model);
        let selection = Selection::agreed(self.model, &ranks, options, None)?;
        let loaded =
            with_local_state(self.model, optimizer, state, &selection, is_stored, part_of_sharded);
        replace_agreed(&ranks, optimizer, loaded)
    }

    /// Loads a state that this rank took with [`local_optimizer`](Self::local_optimizer).
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StateMismatch`] where the layout differs; the optimizer is unchanged.
    pub fn load_local_optimizer(
        &self,
        optimizer: &mut ModuleOptimizer,
        state: &OptimizerState<LocalTensor>,
    ) -> Result<(), CheckpointError> {
        if let Some(layout) = &state.layout {
            layout.check(&LocalLayout::of(self.model))?;
        }
        let all = Selection::all(self.model);
        let loaded =
            with_local_state(self.model, optimizer, state, &all, is_stored, |_, tensor| {
                Ok(tensor.0.clone())
            })?;
        *optimizer = loaded.0;
        Ok(())
    }

    /// Loads an optimizer's full state, which every rank must provide.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StateMismatch`] with every difference; the optimizer is unchanged.
    pub fn load_full_optimizer(
        &self,
        optimizer: &mut ModuleOptimizer,
        state: &OptimizerState<TensorData>,
    ) -> Result<(), CheckpointError> {
        let all = Selection::all(self.model);
        let loaded = with_local_state(self.model, optimizer, state, &all, is_stored, part_of_full)?;
        *optimizer = loaded.0;
        Ok(())
    }

    /// Loads an optimizer's full state, which every rank must provide, for the parameters that
    /// `options` select. Every rank calls it, with equal options. What it keeps and reports is as
    /// with [`load_sharded_optimizer_with`](Self::load_sharded_optimizer_with).
    ///
    /// # Errors
    ///
    /// Those of [`load_sharded_optimizer_with`](Self::load_sharded_optimizer_with).
    pub fn load_full_optimizer_with(
        &self,
        optimizer: &mut ModuleOptimizer,
        state: &OptimizerState<TensorData>,
        options: &StateDictOptions,
    ) -> Result<LoadReport, Error> {
        let (ranks, all) = (Ranks::from(self.model), Some(Recipient::All));
        let selection = Selection::agreed(self.model, &ranks, options, all)?;
        let loaded =
            with_local_state(self.model, optimizer, state, &selection, is_stored, part_of_full);
        replace_agreed(&ranks, optimizer, loaded)
    }
}

impl WholeParam {
    /// Gathers the full state to one rank or to all, each matrix's state from the matrix's owner.
    /// Every rank calls it. A rank that does not receive the state needs memory for one full tensor
    /// at a time.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Record`] for state that Burn cannot convert to a record, and
    /// [`CollectiveError`](crate::errors::CollectiveError) when another rank does not take part in time.
    pub fn full_state<M: FsdpModule>(
        &self,
        model: &Fsdp<M>,
        recipient: Recipient,
    ) -> Result<OptimizerState<TensorData>, Error> {
        gather_state(model, self.inner(), recipient, true, &Selection::all(model))
    }

    /// Gathers the full state for the parameters that `options` select, as
    /// [`full_state`](Self::full_state) does. Every rank calls it, with equal options.
    ///
    /// # Errors
    ///
    /// Those of [`full_state`](Self::full_state), [`CheckpointError::Filter`] where the filter does
    /// not fit the model, and [`CheckpointError::RanksDiffer`] where ranks have other options.
    pub fn full_state_with<M: FsdpModule>(
        &self,
        model: &Fsdp<M>,
        recipient: Recipient,
        options: &StateDictOptions,
    ) -> Result<OptimizerState<TensorData>, Error> {
        let ranks = Ranks::from(model);
        let selection = Selection::agreed(model, &ranks, options, Some(recipient))?;
        gather_state(model, self.inner(), recipient, true, &selection)
    }

    /// Loads a full state, which every rank must provide. Each rank loads the state of the matrices
    /// that it owns and of the replicated parameters.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StateMismatch`] with every difference; the optimizer is unchanged.
    pub fn load_full_state<M: FsdpModule>(
        &mut self,
        model: &Fsdp<M>,
        state: &OptimizerState<TensorData>,
    ) -> Result<(), CheckpointError> {
        let all = Selection::all(model);
        *self.inner_mut() = self.with_full_state(model, state, &all)?.0;
        Ok(())
    }

    /// Loads a full state, which every rank must provide, for the parameters that `options` select.
    /// Every rank calls it, with equal options. What it keeps and reports is as with
    /// [`load_sharded_optimizer_with`](State::load_sharded_optimizer_with).
    ///
    /// # Errors
    ///
    /// Those of [`load_sharded_optimizer_with`](State::load_sharded_optimizer_with).
    pub fn load_full_state_with<M: FsdpModule>(
        &mut self,
        model: &Fsdp<M>,
        state: &OptimizerState<TensorData>,
        options: &StateDictOptions,
    ) -> Result<LoadReport, Error> {
        let ranks = Ranks::from(model);
        let selection = Selection::agreed(model, &ranks, options, Some(Recipient::All))?;
        let loaded = self.with_full_state(model, state, &selection);
        replace_agreed(&ranks, self.inner_mut(), loaded)
    }

    /// Returns a copy of the optimizer with a full state's part of the matrices that this rank owns
    /// and of the replicated parameters, and what was found in the state.
    fn with_full_state<M: FsdpModule>(
        &self,
        model: &Fsdp<M>,
        state: &OptimizerState<TensorData>,
        selection: &Selection,
    ) -> Result<(ModuleOptimizer, Found), CheckpointError> {
        let mesh = model.mesh();
        let owners = owners(model.schedule.units(), mesh);
        let steps = |index: ParamIndex, spec: &ParamSpec| match spec.placement {
            Placement::Shard(_) => owners.get(&index) == Some(&mesh.shard_rank().index()),
            _ => is_stored(index, spec),
        };
        with_local_state(model, self.inner(), state, selection, steps, |_, data| Ok(data.clone()))
    }
}

/// Replaces an optimizer by a copy with a loaded state if every rank has one. Every rank calls it.
/// Returns the report, or an error on every rank if any rank has an error.
fn replace_agreed(
    ranks: &Ranks,
    optimizer: &mut ModuleOptimizer,
    loaded: Result<(ModuleOptimizer, Found), CheckpointError>,
) -> Result<LoadReport, Error> {
    let (loaded, found) = ranks.agree(WHAT, loaded)?;
    let report = found.report(ranks, WHAT)?;
    *optimizer = loaded;
    Ok(report)
}

/// Returns a tensor of an optimizer's state as this rank's elements of the full tensor.
fn sharded_tensor(spec: &ParamSpec, tensor: StateTensor) -> Result<ShardedTensor, CheckpointError> {
    let (shape, range) = full_shape(spec, &tensor)?;
    let data = TensorData::from_bytes(tensor.bytes, vec![range.len()], tensor.dtype);
    Ok(ShardedTensor { shape, range, data })
}

/// Returns this rank's part of a tensor, given the rank's elements of it, or describes why the
/// tensor does not fit.
fn part_of_sharded(spec: &ParamSpec, tensor: &ShardedTensor) -> Result<TensorData, String> {
    let (shape, expected) = match tensor.shape == spec.shape {
        true => (spec.base_shape(), spec.range()),
        false if !matches!(spec.placement, Placement::Shard(_)) => {
            (tensor.shape.clone(), 0..tensor.shape.iter().product())
        }
        false => return Err(format!("shape {:?} cannot be sharded", tensor.shape)),
    };
    let found = tensor.data.num_elements();
    match difference("elements", &tensor.range, &expected)
        .or_else(|| difference("length", &found, &expected.len()))
    {
        Some(difference) => Err(difference),
        None => Ok(copied_data(tensor.data.as_bytes(), shape, tensor.data.dtype())),
    }
}

/// Returns this rank's part of a full tensor, or describes why the tensor does not fit.
fn part_of_full(spec: &ParamSpec, full: &TensorData) -> Result<TensorData, String> {
    let (bytes, size) = (full.as_bytes(), full.dtype().size());
    if full.shape().as_slice() == spec.shape {
        let shard = spec.range().start * size..spec.range().end * size;
        return Ok(copied_data(&bytes[shard], spec.base_shape(), full.dtype()));
    }
    match spec.placement {
        Placement::Replicated | Placement::PerRank => Ok(full.clone()),
        _ => Err(format!("shape {:?} cannot be sharded", full.shape())),
    }
}

/// Returns whether this rank stores elements of a parameter, and so steps it.
fn is_stored(_: ParamIndex, spec: &ParamSpec) -> bool {
    !spec.range().is_empty()
}

/// Returns the full shape of a tensor of an optimizer's state, and the range of elements that this
/// rank has of it.
fn full_shape(
    spec: &ParamSpec,
    tensor: &StateTensor,
) -> Result<(Vec<usize>, Range<usize>), CheckpointError> {
    // A rank with an empty shard never steps the parameter, and so has no valid state of it.
    if tensor.shape == spec.base_shape() && !spec.range().is_empty() {
        return Ok((spec.shape.clone(), spec.range()));
    }
    if !matches!(spec.placement, Placement::Shard(_)) {
        return Ok((tensor.shape.clone(), 0..tensor.shape.iter().product()));
    }
    Err(CheckpointError::NotElementwise {
        tensor: format!("{}: {}", spec.path, tensor.name),
        expected: spec.base_shape(),
        found: tensor.shape.clone(),
    })
}
