//! Taking and loading state dicts of optimizers. Tensors of the parameter's shape, such as moments,
//! are sharded as the parameter is.

use std::ops::Range;

use burn::optim::ModuleOptimizer;
use burn::tensor::TensorData;

use super::layout::{LocalLayout, difference};
use super::optimizer_gather::gather_state;
use super::optimizer_local::{read_local_state, write_local_state};
use super::optimizer_tensors::{LocalTensor, OptimizerState};
use super::recipient::Recipient;
use super::tensors::{ShardedTensor, copied_data};
use crate::checkpoint::optimizer_state::StateTensor;
use crate::checkpoint::state::State;
use crate::error::{CheckpointError, Error};
use crate::fully_shard::Fsdp;
use crate::module::{FsdpModule, ParamIndex};
use crate::optim::{WholeParam, owners};
use crate::param_group::{ParamSpec, Placement};

impl<M: FsdpModule> State<'_, M> {
    /// Returns this rank's elements of an optimizer's state.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NotElementwise`] for state that cannot be sharded.
    pub fn sharded_optimizer(
        &self,
        optimizer: &ModuleOptimizer,
    ) -> Result<OptimizerState<ShardedTensor>, CheckpointError> {
        read_local_state(self.model, optimizer, |spec, tensor| {
            let (shape, range) = full_shape(spec, &tensor)?;
            let data = TensorData::from_bytes(tensor.bytes, vec![range.len()], tensor.dtype);
            Ok(ShardedTensor { shape, range, data })
        })
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
        let state = read_local_state(self.model, optimizer, |_, tensor| {
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
    /// [`CollectiveError`](crate::CollectiveError) when another rank does not take part in time.
    pub fn full_optimizer(
        &self,
        optimizer: &ModuleOptimizer,
        recipient: Recipient,
    ) -> Result<OptimizerState<TensorData>, Error> {
        gather_state(self.model, optimizer, recipient, false)
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
        write_local_state(self.model, optimizer, state, is_stored, |spec, tensor| {
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
        })
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
        write_local_state(self.model, optimizer, state, is_stored, |_, tensor| Ok(tensor.0.clone()))
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
        write_local_state(self.model, optimizer, state, is_stored, |spec, data| {
            let (bytes, size) = (data.as_bytes(), data.dtype().size());
            if data.shape().as_slice() == spec.shape {
                let shard = spec.range().start * size..spec.range().end * size;
                return Ok(copied_data(&bytes[shard], spec.base_shape(), data.dtype()));
            }
            match spec.placement {
                Placement::Replicated | Placement::PerRank => Ok(data.clone()),
                _ => Err(format!("shape {:?} cannot be sharded", data.shape())),
            }
        })
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
    /// [`CollectiveError`](crate::CollectiveError) when another rank does not take part in time.
    pub fn full_state<M: FsdpModule>(
        &self,
        model: &Fsdp<M>,
        recipient: Recipient,
    ) -> Result<OptimizerState<TensorData>, Error> {
        gather_state(model, self.inner(), recipient, true)
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
        let mesh = model.mesh();
        let owners = owners(model.schedule.units(), mesh);
        let steps = |index: ParamIndex, spec: &ParamSpec| match spec.placement {
            Placement::Shard(_) => owners.get(&index) == Some(&mesh.shard_rank().index()),
            _ => is_stored(index, spec),
        };
        write_local_state(model, self.inner_mut(), state, steps, |_, data| Ok(data.clone()))
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
