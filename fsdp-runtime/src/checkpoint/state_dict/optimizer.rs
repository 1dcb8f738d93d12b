//! State dicts of optimizers: by the path of the parameter, so that they outlive a process.
//!
//! Tensors of the parameter's shape, such as moments, are sharded as the parameter is.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::module::ParamId;
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, DType, Tensor, TensorData};

use crate::checkpoint::Scalars;
use crate::checkpoint::State;
use crate::checkpoint::model::{Holding, Model};
use crate::checkpoint::optimizer::{self, Kind, Names, NewState, StateTensor};
use crate::checkpoint::ranks::Ranks;
use crate::checkpoint::state_dict::{
    Layout, Recipient, ShardedTensor, different, same_layout, tensor_data,
};
use crate::error::CheckpointError;
use crate::error::Error;
use crate::fully_shard::Fsdp;
use crate::module::FsdpModule;
use crate::module::ParamIndex;
use crate::optim::{WholeParam, owners};
use crate::param_group::{ParamSpec, Placement};

/// An optimizer's state by the path of the parameter: of full tensors ([`TensorData`]), of a rank's
/// elements ([`ShardedTensor`]), or of what it holds as it lies ([`LocalTensor`]).
#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerState<T> {
    /// The parameters that have state.
    pub parameters: BTreeMap<String, ParameterState<T>>,
    layout: Option<Layout>,
}

/// An optimizer's state of one parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterState<T> {
    /// Numbers, such as the count of steps, by name.
    pub scalars: Scalars,
    /// Tensors, such as moments, by name.
    pub tensors: BTreeMap<String, T>,
}

/// A tensor as a rank holds it: what it belongs to is known by its [`OptimizerState`] alone.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalTensor(TensorData);

impl LocalTensor {
    /// Its values, in the shape the rank holds.
    pub fn data(&self) -> &TensorData {
        &self.0
    }
}

impl<T> Default for OptimizerState<T> {
    fn default() -> Self {
        Self { parameters: BTreeMap::new(), layout: None }
    }
}

/// The name errors call an optimizer by whose state is in memory.
const NAME: &str = "in memory";

impl<M: FsdpModule> State<'_, M> {
    /// This rank's elements of an optimizer's state.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NotElementwise`] for state that cannot be sharded.
    pub fn sharded_optimizer(
        &self,
        optimizer: &ModuleOptimizer,
    ) -> Result<OptimizerState<ShardedTensor>, CheckpointError> {
        self.model.read_optimizer(optimizer, |entry, tensor| {
            let (shape, range) = full_shape(entry, &tensor)?;
            let data = TensorData::from_bytes(tensor.bytes, vec![range.len()], tensor.dtype);
            Ok(ShardedTensor { shape, range, data })
        })
    }

    /// What this rank holds of an optimizer's state, as it lies; loadable in this layout alone.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Record`] for a record that Burn cannot write.
    pub fn local_optimizer(
        &self,
        optimizer: &ModuleOptimizer,
    ) -> Result<OptimizerState<LocalTensor>, CheckpointError> {
        let state = self.model.read_optimizer(optimizer, |_, tensor| {
            Ok(LocalTensor(TensorData::from_bytes(tensor.bytes, tensor.shape, tensor.dtype)))
        })?;
        Ok(OptimizerState { layout: Some(self.model.layout()), ..state })
    }

    /// Gathers an optimizer's full state for one rank or for all. Every rank calls it; those that
    /// do not receive hold one tensor more than their shards at a time.
    ///
    /// # Errors
    ///
    /// As [`sharded_optimizer`](Self::sharded_optimizer), and
    /// [`CollectiveError`](crate::CollectiveError) when a rank does not come.
    pub fn full_optimizer(
        &self,
        optimizer: &ModuleOptimizer,
        recipient: Recipient,
    ) -> Result<OptimizerState<TensorData>, Error> {
        self.model.full_of(optimizer, recipient, false)
    }

    /// Loads this rank's elements of an optimizer's state.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StateMismatch`] with everything that differs; the optimizer is unchanged.
    pub fn load_sharded_optimizer(
        &self,
        optimizer: &mut ModuleOptimizer,
        state: &OptimizerState<ShardedTensor>,
    ) -> Result<(), CheckpointError> {
        self.model.write_optimizer(optimizer, state, holds, |entry, tensor| {
            let (shape, expected) = match tensor.shape == entry.shape {
                true => (entry.base_shape(), entry.range()),
                false if !matches!(entry.held, Placement::Shard(_)) => {
                    (tensor.shape.clone(), 0..tensor.shape.iter().product())
                }
                false => return Err(format!("shape {:?} cannot be sharded", tensor.shape)),
            };
            let found = tensor.data.num_elements();
            match different("elements", &tensor.range, &expected)
                .or_else(|| different("length", &found, &expected.len()))
            {
                Some(difference) => Err(difference),
                None => Ok(tensor_data(tensor.data.as_bytes(), shape, tensor.data.dtype())),
            }
        })
    }

    /// Loads what this rank held of an optimizer's state.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StateMismatch`] where the layout is another one; the optimizer is
    /// unchanged.
    pub fn load_local_optimizer(
        &self,
        optimizer: &mut ModuleOptimizer,
        state: &OptimizerState<LocalTensor>,
    ) -> Result<(), CheckpointError> {
        if let Some(layout) = &state.layout {
            same_layout(layout, &self.model.layout())?;
        }
        self.model.write_optimizer(optimizer, state, holds, |_, tensor| Ok(tensor.0.clone()))
    }

    /// Loads an optimizer's full state, which every rank gives.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StateMismatch`] with everything that differs; the optimizer is unchanged.
    pub fn load_full_optimizer(
        &self,
        optimizer: &mut ModuleOptimizer,
        state: &OptimizerState<TensorData>,
    ) -> Result<(), CheckpointError> {
        self.model.write_optimizer(optimizer, state, holds, |entry, data| {
            let (bytes, size) = (data.as_bytes(), data.dtype().size());
            if data.shape().as_slice() == entry.shape {
                let part = entry.range().start * size..entry.range().end * size;
                return Ok(tensor_data(&bytes[part], entry.base_shape(), data.dtype()));
            }
            match entry.held {
                Placement::Replicated | Placement::PerRank => Ok(data.clone()),
                _ => Err(format!("shape {:?} cannot be sharded", data.shape())),
            }
        })
    }
}

impl<M: FsdpModule> Fsdp<M> {
    /// The full state of an optimizer, which may have the state of sharded matrices `whole`, on one
    /// rank each.
    fn full_of(
        &self,
        optimizer: &ModuleOptimizer,
        recipient: Recipient,
        whole: bool,
    ) -> Result<OptimizerState<TensorData>, Error> {
        recipient.check(self.mesh().world)?;
        let (ranks, keep) = (Ranks::from(self), recipient.is(self.mesh().rank));
        let mut full = OptimizerState::default();
        let mut names = Names::default();
        let mut held = Vec::new();
        self.visit(&mut |holding| held.push(holding));
        for holding in held {
            let entry = self.entry(holding.place);
            let state = optimizer::read(NAME, optimizer, &[holding.id], &mut names)
                .map(|mut states| states.remove(&holding.id));
            // A rank with no elements of the parameter has no state of it, and learns its kind.
            let kinds = state.as_ref().ok().and_then(Option::as_ref).map(|state| {
                let kind = |tensor: &StateTensor| {
                    (tensor.name.clone(), tensor.dtype, tensor.shape == entry.base_shape())
                };
                (state.scalars.clone(), state.tensors.iter().map(kind).collect::<Vec<_>>())
            });
            let what = format!("optimizer state of `{}`", entry.path);
            let mut state = ranks.settle(&what, state)?;
            let all = ranks.exchange(&what, kinds)?;
            let Some((scalars, kinds)) = all.iter().find_map(|kind| kind.as_ref().as_ref()) else {
                continue;
            };
            let mut tensors = BTreeMap::new();
            for (name, dtype, elementwise) in kinds {
                let own = state.as_mut().and_then(|state| {
                    let at = state.tensors.iter().position(|tensor| tensor.name == *name)?;
                    Some(state.tensors.swap_remove(at))
                });
                let data = match entry.held {
                    Placement::PerRank => self.first(entry, own, keep)?,
                    Placement::Shard(_) if whole => self.first(entry, own, keep)?,
                    _ => self.gather(&holding, entry, *dtype, *elementwise, own, keep)?,
                };
                if let Some(data) = data {
                    tensors.insert(name.clone(), data);
                }
            }
            if keep {
                let scalars = scalars.clone();
                full.parameters.insert(entry.path.clone(), ParameterState { scalars, tensors });
            }
        }
        Ok(full)
    }

    /// An optimizer's state of what this rank holds, each tensor through `map`.
    fn read_optimizer<T>(
        &self,
        optimizer: &ModuleOptimizer,
        map: impl Fn(&ParamSpec, StateTensor) -> Result<T, CheckpointError>,
    ) -> Result<OptimizerState<T>, CheckpointError> {
        let mut places: Vec<(ParamId, ParamIndex)> = Vec::new();
        self.visit(&mut |held| places.push((held.id, held.place)));
        let mut state = OptimizerState::default();
        let mut names = Names::default();
        for (id, place) in places {
            let Some(read) = optimizer::read(NAME, optimizer, &[id], &mut names)?.remove(&id)
            else {
                continue;
            };
            let entry = self.entry(place);
            let tensors = read.tensors.into_iter().map(|tensor| {
                let name = tensor.name.clone();
                Ok((name, map(entry, tensor)?))
            });
            let (scalars, tensors) = (read.scalars, tensors.collect::<Result<_, _>>()?);
            state.parameters.insert(entry.path.clone(), ParameterState { scalars, tensors });
        }
        Ok(state)
    }

    /// Puts state of what this rank `steps` into an optimizer, each tensor through `map`, which says
    /// what differs.
    fn write_optimizer<T>(
        &self,
        optimizer: &mut ModuleOptimizer,
        state: &OptimizerState<T>,
        steps: impl Fn(ParamIndex, &ParamSpec) -> bool,
        map: impl Fn(&ParamSpec, &T) -> Result<TensorData, String>,
    ) -> Result<(), CheckpointError> {
        let (mut states, mut kinds, mut differences) = (Vec::new(), Vec::new(), Vec::new());
        let mut known = Vec::new();
        self.visit(&mut |held| {
            let entry = self.entry(held.place);
            known.push(entry.path.as_str());
            let Some(found) = state.parameters.get(&entry.path) else { return };
            if !steps(held.place, entry) {
                return;
            }
            let (path, rank) = (entry.path.clone(), entry.shape.len());
            let mut new = NewState {
                id: held.id,
                path: path.clone(),
                rank,
                scalars: found.scalars.clone(),
                tensors: Vec::new(),
            };
            let mut tensors = Vec::new();
            for (name, tensor) in &found.tensors {
                match map(entry, tensor) {
                    Err(difference) => {
                        differences.push(format!("`{path}`, `{name}`: {difference}"))
                    }
                    Ok(data) => {
                        let (bytes, shape, dtype) = data.into_parts();
                        tensors.push((name.clone(), dtype));
                        let tensor =
                            burn_pack::Tensor::new(name.clone(), dtype, shape, None, bytes);
                        new.tensors.push(tensor);
                    }
                }
            }
            let scalars = found.scalars.clone();
            kinds.push(Kind { id: held.id, path, rank, scalars, tensors });
            states.push(new);
        });
        let unexpected = state.parameters.keys().filter(|path| !known.contains(&path.as_str()));
        differences.extend(unexpected.map(|path| format!("unexpected: `{path}`")));
        differences.extend(optimizer::differences(NAME, optimizer, &kinds)?);
        if !differences.is_empty() {
            return Err(CheckpointError::StateMismatch { differences });
        }
        *optimizer = optimizer::with_state(NAME, optimizer, states)?;
        Ok(())
    }

    /// The first rank's of a tensor of an optimizer's state that one rank has, or each for itself;
    /// every rank calls.
    fn first(
        &self,
        entry: &ParamSpec,
        own: Option<StateTensor>,
        keep: bool,
    ) -> Result<Option<TensorData>, Error> {
        let what = format!("optimizer state of `{}`", entry.path);
        let all = Ranks::from(self).exchange(&what, own.map(StateTensor::into_data))?;
        Ok(all.iter().find_map(|data| (**data).clone()).filter(|_| keep))
    }

    /// One full tensor of an optimizer's state; every rank calls.
    fn gather(
        &self,
        holding: &Holding,
        entry: &ParamSpec,
        dtype: DType,
        elementwise: bool,
        own: Option<StateTensor>,
        keep: bool,
    ) -> Result<Option<TensorData>, Error> {
        if entry.held == Placement::Replicated {
            return Ok(own.filter(|_| keep).map(StateTensor::into_data));
        }
        if !elementwise {
            let found = own.map(|own| own.shape).unwrap_or_default();
            let (tensor, expected) = (entry.path.clone(), entry.base_shape());
            return Err(CheckpointError::NotElementwise { tensor, expected, found }.into());
        }
        let bytes =
            own.map_or_else(|| Bytes::from_bytes_vec(vec![0; dtype.size()]), |own| own.bytes);
        let data = tensor_data(&bytes, vec![bytes.len() / dtype.size()], dtype);
        let device = holding.device.clone().inner();
        let shard = Tensor::<1>::from_data(data, (&device, dtype)).into_dispatch();
        self.engine.full(holding.place, shard, keep)
    }
}

impl WholeParam {
    /// Gathers the full state for one rank or for all, each matrix's from its owner. Every rank calls
    /// it; those that do not receive hold one tensor more at a time.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Record`] for a record that Burn cannot write, and
    /// [`CollectiveError`](crate::CollectiveError) when a rank does not come.
    pub fn full_state<M: FsdpModule>(
        &self,
        model: &Fsdp<M>,
        recipient: Recipient,
    ) -> Result<OptimizerState<TensorData>, Error> {
        model.full_of(self.inner(), recipient, true)
    }

    /// Loads a full state, which every rank gives; each owner takes that of its matrices.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StateMismatch`] with everything that differs; the optimizer is unchanged.
    pub fn load_full_state<M: FsdpModule>(
        &mut self,
        model: &Fsdp<M>,
        state: &OptimizerState<TensorData>,
    ) -> Result<(), CheckpointError> {
        let mesh = model.mesh();
        let owners = owners(model.engine.units(), mesh);
        let steps = |place: ParamIndex, entry: &ParamSpec| match entry.held {
            Placement::Shard(_) => owners.get(&place) == Some(&mesh.shard_rank().index()),
            _ => holds(place, entry),
        };
        model.write_optimizer(self.inner_mut(), state, steps, |_, data| Ok(data.clone()))
    }
}

/// Whether a rank has state of a parameter that is stepped in shards.
fn holds(_: ParamIndex, entry: &ParamSpec) -> bool {
    !entry.range().is_empty()
}

/// The full shape of an optimizer's tensor, and the elements of it that the rank holds.
fn full_shape(
    entry: &ParamSpec,
    tensor: &StateTensor,
) -> Result<(Vec<usize>, Range<usize>), CheckpointError> {
    // A rank that holds nothing of a parameter never steps it.
    if tensor.shape == entry.base_shape() && !entry.range().is_empty() {
        return Ok((entry.shape.clone(), entry.range()));
    }
    if !matches!(entry.held, Placement::Shard(_)) {
        return Ok((tensor.shape.clone(), 0..tensor.shape.iter().product()));
    }
    Err(CheckpointError::NotElementwise {
        tensor: format!("{}: {}", entry.path, tensor.name),
        expected: entry.base_shape(),
        found: tensor.shape.clone(),
    })
}
