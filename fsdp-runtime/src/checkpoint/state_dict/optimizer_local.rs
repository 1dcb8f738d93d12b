//! Reading and replacing this rank's part of an optimizer's state.

use burn::module::ParamId;
use burn::optim::ModuleOptimizer;
use burn::tensor::TensorData;

use super::optimizer_tensors::{OptimizerState, ParameterState};
use crate::checkpoint::optimizer_state::{
    self, NewParamState, StateNames, StateSchema, StateTensor,
};
use crate::checkpoint::sharded_model::ShardedModel;
use crate::error::CheckpointError;
use crate::module::ParamIndex;
use crate::param_group::ParamSpec;

/// Name of an optimizer whose state is in memory, in errors.
pub(super) const NAME: &str = "in memory";

/// Returns this rank's part of an optimizer's state. `convert` converts each tensor.
pub(super) fn read_local_state<T>(
    model: &dyn ShardedModel,
    optimizer: &ModuleOptimizer,
    convert: impl Fn(&ParamSpec, StateTensor) -> Result<T, CheckpointError>,
) -> Result<OptimizerState<T>, CheckpointError> {
    let mut params: Vec<(ParamId, ParamIndex)> = Vec::new();
    model.for_each_param(&mut |param| params.push((param.id, param.index)));
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

/// Replaces an optimizer's state by `state`, for the parameters that this rank steps according to
/// `steps`. `convert` converts each tensor to this rank's part, or describes why the tensor does
/// not fit.
///
/// # Errors
///
/// [`CheckpointError::StateMismatch`] with every difference; the optimizer is unchanged.
pub(super) fn write_local_state<T>(
    model: &dyn ShardedModel,
    optimizer: &mut ModuleOptimizer,
    state: &OptimizerState<T>,
    steps: impl Fn(ParamIndex, &ParamSpec) -> bool,
    convert: impl Fn(&ParamSpec, &T) -> Result<TensorData, String>,
) -> Result<(), CheckpointError> {
    let (mut states, mut schemas, mut differences) = (Vec::new(), Vec::new(), Vec::new());
    let mut known = Vec::new();
    model.for_each_param(&mut |param| {
        let spec = model.spec(param.index);
        known.push(spec.path.as_str());
        let Some(found) = state.parameters.get(&spec.path) else { return };
        if !steps(param.index, spec) {
            return;
        }
        let (new, found_differences) =
            new_state(param.id, spec, found, |tensor| convert(spec, tensor));
        differences.extend(found_differences);
        schemas.push(schema(&new));
        states.push(new);
    });
    let unexpected = state.parameters.keys().filter(|path| !known.contains(&path.as_str()));
    differences.extend(unexpected.map(|path| format!("unexpected: `{path}`")));
    differences.extend(optimizer_state::differences(NAME, optimizer, &schemas)?);
    if !differences.is_empty() {
        return Err(CheckpointError::StateMismatch { differences });
    }
    *optimizer = optimizer_state::with_state(NAME, optimizer, states)?;
    Ok(())
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
