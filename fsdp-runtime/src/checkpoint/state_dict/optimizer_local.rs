//! Reading and replacing this rank's part of an optimizer's state.

use std::collections::HashMap;

use burn::module::ParamId;
use burn::optim::ModuleOptimizer;
use burn::tensor::TensorData;

use super::compare::sort_others;
use super::optimizer_tensors::{OptimizerState, ParameterState};
use super::report::Found;
use super::selection::Selection;
use crate::checkpoint::optimizer_state::{
    self, NewParamState, StateNames, StateSchema, StateTensor,
};
use crate::checkpoint::sharded_model::ShardedModel;
use crate::error::CheckpointError;
use crate::module::ParamIndex;
use crate::param_group::ParamSpec;

/// Name of an optimizer whose state is in memory, in errors.
pub(super) const NAME: &str = "in memory";

/// Returns this rank's part of an optimizer's state for the selected parameters. `convert` converts
/// each tensor.
pub(super) fn read_local_state<T>(
    model: &dyn ShardedModel,
    optimizer: &ModuleOptimizer,
    selection: &Selection,
    convert: impl Fn(&ParamSpec, StateTensor) -> Result<T, CheckpointError>,
) -> Result<OptimizerState<T>, CheckpointError> {
    let mut params: Vec<(ParamId, ParamIndex)> = Vec::new();
    model.for_each_param(&mut |param| params.push((param.id, param.index)));
    params.retain(|(_, index)| selection.contains(*index));
    let mut state = OptimizerState::default();
    let mut names = StateNames::default();
    for (id, index) in params {
        let mut states = optimizer_state::read(NAME, optimizer, &[id], &mut names)?;
        let Some(found) = states.remove(&id) else { continue };
        let spec = model.spec(index);
        let tensors = found.tensors.into_iter().map(|tensor| {
            let name = tensor.name.clone();
            Ok((name, convert(spec, tensor)?))
        });
        let tensors = tensors.collect::<Result<_, CheckpointError>>()?;
        let param = ParameterState { scalars: found.scalars, tensors };
        state.parameters.insert(spec.path.clone(), param);
    }
    Ok(state)
}

/// Returns a copy of an optimizer whose state of the selected parameters is that of `state`, where
/// this rank steps them according to `steps`, and what was found in `state`. `convert` converts
/// each tensor to this rank's part, or describes why the tensor does not fit.
///
/// Parameters outside of the selection keep their state. So do those that `state` lacks if the
/// selection is lenient; otherwise they have none in the copy.
///
/// # Errors
///
/// [`CheckpointError::StateMismatch`] with every difference.
pub(super) fn with_local_state<T>(
    model: &dyn ShardedModel,
    optimizer: &ModuleOptimizer,
    state: &OptimizerState<T>,
    selection: &Selection,
    steps: impl Fn(ParamIndex, &ParamSpec) -> bool,
    convert: impl Fn(&ParamSpec, &T) -> Result<TensorData, String>,
) -> Result<(ModuleOptimizer, Found), CheckpointError> {
    let (mut states, mut schemas, mut differences) = (Vec::new(), Vec::new(), Vec::new());
    let (mut report, mut kept) = (Found::default(), Vec::new());
    // Whether each path of the model is selected.
    let mut known = HashMap::new();
    model.for_each_param(&mut |param| {
        let spec = model.spec(param.index);
        let selected = selection.contains(param.index);
        known.insert(spec.path.as_str(), selected);
        if !selected {
            kept.push((param.id, param.index));
            return;
        }
        let is_stepped = steps(param.index, spec);
        let Some(found) = state.parameters.get(&spec.path) else {
            if selection.lenient {
                kept.push((param.id, param.index));
            }
            if is_stepped && param.is_tracked {
                report.missing.insert(spec.path.clone());
            }
            return;
        };
        if !is_stepped {
            return;
        }
        let (new, found_differences) =
            new_state(param.id, spec, found, |tensor| convert(spec, tensor));
        differences.extend(found_differences);
        schemas.push(schema(&new));
        states.push(new);
        report.loaded.insert(spec.path.clone());
    });
    differences.extend(sort_others(state.parameters.keys(), &known, selection, &mut report));
    differences.extend(optimizer_state::differences(NAME, optimizer, &schemas)?);
    if !differences.is_empty() {
        return Err(CheckpointError::StateMismatch { differences });
    }
    states.extend(kept_states(model, optimizer, kept)?);
    Ok((optimizer_state::with_state(NAME, optimizer, states)?, report))
}

/// Returns an optimizer's own state of the given parameters, to load it again unchanged.
fn kept_states(
    model: &dyn ShardedModel,
    optimizer: &ModuleOptimizer,
    params: Vec<(ParamId, ParamIndex)>,
) -> Result<Vec<NewParamState>, CheckpointError> {
    let (mut kept, mut names) = (Vec::new(), StateNames::default());
    for (id, index) in params {
        let mut states = optimizer_state::read(NAME, optimizer, &[id], &mut names)?;
        let Some(found) = states.remove(&id) else { continue };
        let spec = model.spec(index);
        let tensor = |StateTensor { name, dtype, shape, bytes }| {
            burn_pack::Tensor::new(name, dtype, shape, None, bytes)
        };
        kept.push(NewParamState {
            id,
            path: spec.path.clone(),
            rank: spec.shape.len(),
            scalars: found.scalars,
            tensors: found.tensors.into_iter().map(tensor).collect(),
        });
    }
    Ok(kept)
}

/// Converts each tensor of one parameter's state with `convert`. Returns the converted tensors, and
/// a text for each tensor that does not fit the parameter.
fn new_state<T>(
    id: ParamId,
    spec: &ParamSpec,
    found: &ParameterState<T>,
    convert: impl Fn(&T) -> Result<TensorData, String>,
) -> (NewParamState, Vec<String>) {
    let (mut tensors, mut differences) = (Vec::new(), Vec::new());
    for (name, tensor) in &found.tensors {
        match convert(tensor) {
            Err(difference) => differences.push(format!("`{}`, `{name}`: {difference}", spec.path)),
            Ok(data) => {
                let (bytes, shape, dtype) = data.into_parts();
                tensors.push(burn_pack::Tensor::new(name.clone(), dtype, shape, None, bytes));
            }
        }
    }
    let state = NewParamState {
        id,
        path: spec.path.clone(),
        rank: spec.shape.len(),
        scalars: found.scalars.clone(),
        tensors,
    };
    (state, differences)
}

fn schema(state: &NewParamState) -> StateSchema {
    StateSchema {
        id: state.id,
        path: state.path.clone(),
        rank: state.rank,
        scalars: state.scalars.clone(),
        tensors: state.tensors.iter().map(|t| (t.name.clone(), t.dtype)).collect(),
    }
}
