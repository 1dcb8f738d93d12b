//! State of any Burn optimizer, by parameter.
//!
//! Burn keeps an optimizer's state by parameter id. It gives access through a record, whose
//! serialised form, a burnpack, has tensors `{id}.{name}`, numbers `{id}.{name}`, and the path of
//! each parameter, which decides the optimizer's parameter group.
//!
//! [`read`] reads the record of a few parameters at a time, so that little state exists twice. Once
//! the names in the state are known it avoids the serialised form: it loads the record into a
//! recording optimizer, which keeps the tensors that Burn hands it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use burn::module::{ParamGroup, ParamId};
use burn::optim::{
    DynOptimizer, DynState, LearningRate, ModuleOptimizer, OptimizerRecord, SgdConfig, StateSink,
    StateSource,
};
use burn::tensor::kind::BridgeTensor;
use burn::tensor::{Bytes, DType, Device, TensorData};
use burn_pack::{Reader, Tensor, Writer};

use super::scalar::{Scalar, Scalars};
use crate::backend::owned_bytes;
use crate::error::{CheckpointError, IgnorePoison};

/// Name of the number that Burn adds to each parameter's state: the parameter's number of
/// dimensions.
const RANK: &str = "__rank";

/// A tensor of an optimizer's state, in host memory.
#[derive(Debug)]
pub(super) struct StateTensor {
    pub(super) name: String,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: Bytes,
}

impl StateTensor {
    /// Converts the tensor to Burn's data type.
    pub(super) fn into_data(self) -> TensorData {
        TensorData::from_bytes(self.bytes, self.shape, self.dtype)
    }
}

/// State that an optimizer holds for one parameter.
#[derive(Debug, Default)]
pub(super) struct ParamState {
    pub(super) scalars: Scalars,
    pub(super) tensors: Vec<StateTensor>,
}

/// State of one parameter, to load into an optimizer.
pub(super) struct NewParamState {
    pub(super) id: ParamId,
    pub(super) path: String,
    /// Number of dimensions of the parameter.
    pub(super) rank: usize,
    pub(super) scalars: Scalars,
    /// Tensors under the optimizer's own names.
    pub(super) tensors: Vec<Tensor>,
}

/// Names and dtypes in one parameter's state, without the tensors' elements.
pub(super) struct StateSchema {
    pub(super) id: ParamId,
    pub(super) path: String,
    /// Number of dimensions of the parameter.
    pub(super) rank: usize,
    pub(super) scalars: Scalars,
    pub(super) tensors: Vec<(String, DType)>,
}

/// Names of the tensors and numbers found so far in an optimizer's state.
#[derive(Clone, Debug, Default)]
pub(super) struct StateNames {
    tensors: BTreeSet<String>,
    scalars: BTreeSet<String>,
}

/// Returns the state of those of the given parameters that have any. `name` names the optimizer in
/// errors. `names` collects the names found; pass the same value to the next call.
pub(super) fn read(
    name: &str,
    optimizer: &ModuleOptimizer,
    ids: &[ParamId],
    names: &mut StateNames,
) -> Result<HashMap<ParamId, ParamState>, CheckpointError> {
    let others = ParamGroup::all().exclude(ParamGroup::from_ids(ids.to_vec()));
    let selected = without(optimizer, others);
    if let Some(states) = read_by_names(selected.to_record(), names) {
        return Ok(states);
    }
    let states = read_serialised(name, selected.to_record())?;
    for state in states.values() {
        names.tensors.extend(state.tensors.iter().map(|tensor| tensor.name.clone()));
        names.scalars.extend(state.scalars.keys().cloned());
    }
    Ok(states)
}

/// Returns a record's state without a copy; `None` where the record has entries under other names.
fn read_by_names(
    record: OptimizerRecord,
    names: &StateNames,
) -> Option<HashMap<ParamId, ParamState>> {
    // Only the debug output tells how many numbers a record has.
    let text = format!("{record:?}");
    let scalars = text.split("num_scalars: ").nth(1)?.trim_end_matches(" }").parse::<usize>();
    let (tensors, scalars) = (record.len(), scalars.ok()?);
    if tensors + scalars > 0 && names.tensors.is_empty() && names.scalars.is_empty() {
        return None;
    }
    let recorder = StateRecorder { names: names.clone(), states: Arc::default() };
    let states = recorder.states.clone();
    SgdConfig::new().init().with_group(ParamGroup::all(), recorder, None).load_record(record);
    let states = std::mem::take(&mut *lock(&states));
    let count = |count: fn(&ParamState) -> usize| states.values().map(count).sum::<usize>();
    // Each parameter has its number of dimensions in addition.
    let complete = count(|state| state.tensors.len()) == tensors
        && count(|state| state.scalars.len() + 1) == scalars;
    complete.then_some(states)
}

/// An optimizer that keeps the state loaded into it, and never steps.
struct StateRecorder {
    names: StateNames,
    states: Arc<Mutex<HashMap<ParamId, ParamState>>>,
}

/// Locks the recorded states, which are valid at every moment, so that a panic does not matter.
fn lock(
    states: &Mutex<HashMap<ParamId, ParamState>>,
) -> MutexGuard<'_, HashMap<ParamId, ParamState>> {
    states.lock().ignore_poison()
}

impl DynOptimizer for StateRecorder {
    fn step_dyn(
        &self,
        _: usize,
        _: LearningRate,
        tensor: BridgeTensor,
        _: BridgeTensor,
        state: Option<DynState>,
    ) -> (BridgeTensor, Option<DynState>) {
        (tensor, state)
    }

    fn to_device_dyn(&self, state: DynState, _: &Device) -> DynState {
        state
    }

    fn state_flatten(&self, _: &str, _: &DynState, _: &mut StateSink) {}

    fn state_unflatten(
        &self,
        _: usize,
        prefix: &str,
        source: &mut StateSource,
        _: &Device,
    ) -> Option<DynState> {
        let id = ParamId::from(prefix.parse::<u64>().ok()?);
        let mut state = ParamState::default();
        for name in &self.names.tensors {
            if let Some(data) = source.take_tensor(prefix, name) {
                let (bytes, shape, dtype) = data.into_parts();
                let (name, shape) = (name.clone(), shape.as_slice().to_vec());
                state.tensors.push(StateTensor { name, dtype, shape, bytes: owned_bytes(bytes) });
            }
        }
        for name in &self.names.scalars {
            if let Some(scalar) = source.take_scalar(prefix, name) {
                state.scalars.insert(name.clone(), scalar.into());
            }
        }
        lock(&self.states).insert(id, state);
        None
    }
}

/// Returns the state in a record by way of the record's serialised form, whatever the names in it.
fn read_serialised(
    name: &str,
    record: OptimizerRecord,
) -> Result<HashMap<ParamId, ParamState>, CheckpointError> {
    let failed = record_error(name);
    let bytes = record.into_bytes().map_err(|error| failed(error.to_string()))?;
    let reader = Reader::from_bytes(bytes).map_err(|error| failed(error.to_string()))?;
    let mut states: HashMap<ParamId, ParamState> = HashMap::new();
    for (name, value) in reader.scalars() {
        let (id, name) = split_name(name).ok_or_else(|| failed(unknown_entry(name)))?;
        let state = states.entry(id).or_default();
        if name != RANK {
            state.scalars.insert(name.to_string(), Scalar::from(*value));
        }
    }
    for tensor in reader.into_tensors().map_err(|error| failed(error.to_string()))? {
        let (name, dtype, shape, _, bytes) =
            tensor.into_parts().map_err(|error| failed(error.to_string()))?;
        let (id, name) = split_name(&name).ok_or_else(|| failed(unknown_entry(&name)))?;
        let (name, shape) = (name.to_string(), shape.as_slice().to_vec());
        states.entry(id).or_default().tensors.push(StateTensor {
            name,
            dtype,
            shape,
            bytes: owned_bytes(bytes),
        });
    }
    Ok(states)
}

/// Checks that an optimizer has no state of parameters other than the given ones.
///
/// # Errors
///
/// [`CheckpointError::ForeignState`] with the number of other parameters.
pub(super) fn check_no_other_state(
    name: &str,
    optimizer: &ModuleOptimizer,
    ids: &[ParamId],
) -> Result<(), CheckpointError> {
    let others = without(optimizer, ParamGroup::from_ids(ids.to_vec())).to_record();
    let bytes = others.into_bytes().map_err(|error| record_error(name)(error.to_string()))?;
    let others =
        Reader::from_bytes(bytes).map_err(|error| record_error(name)(error.to_string()))?;
    let count = others.scalars().keys().filter(|name| name.ends_with(RANK)).count();
    if count == 0 {
        return Ok(());
    }
    Err(CheckpointError::ForeignState { optimizer: name.into(), count })
}

/// Returns an optimizer of the same kind and with the same parameter groups that has the given
/// state.
pub(super) fn with_state(
    name: &str,
    optimizer: &ModuleOptimizer,
    states: Vec<NewParamState>,
) -> Result<ModuleOptimizer, CheckpointError> {
    let record = record(name, states)?;
    Ok(optimizer.clone().load_record(record))
}

/// Returns a text for each tensor of `schemas` that the optimizer would ignore, and for each that
/// it would lack.
///
/// The function loads state with one element per tensor into a copy of the optimizer, and reads it
/// back.
pub(super) fn differences(
    name: &str,
    optimizer: &ModuleOptimizer,
    schemas: &[StateSchema],
) -> Result<Vec<String>, CheckpointError> {
    let loaded = with_state(name, optimizer, schemas.iter().map(sample).collect())?;
    let ids: Vec<_> = schemas.iter().map(|schema| schema.id).collect();
    let mut accepted = read(name, &loaded, &ids, &mut StateNames::default())?;
    let mut differences = Vec::new();
    for StateSchema { id, path, scalars, tensors, .. } in schemas {
        let Some(state) = accepted.remove(id) else {
            differences
                .push(format!("optimizer `{name}`: its state of `{path}` is of another kind"));
            continue;
        };
        let found: BTreeMap<_, _> =
            state.tensors.iter().map(|tensor| (&tensor.name, tensor.dtype)).collect();
        for (tensor, dtype) in tensors {
            if found.get(tensor) != Some(dtype) {
                differences.push(format!("optimizer `{name}`: it has no `{tensor}` for `{path}`"));
            }
        }
        for scalar in scalars.keys() {
            if state.scalars.get(scalar) != scalars.get(scalar) {
                differences.push(format!("optimizer `{name}`: it has no `{scalar}` for `{path}`"));
            }
        }
    }
    Ok(differences)
}

/// Returns state with these names whose tensors have one element each.
fn sample(schema: &StateSchema) -> NewParamState {
    let tensor = |(name, dtype): &(String, DType)| {
        let bytes = Bytes::from_bytes_vec(vec![0; dtype.size()]);
        Tensor::new(name.clone(), *dtype, vec![1; schema.rank], None, bytes)
    };
    NewParamState {
        id: schema.id,
        path: schema.path.clone(),
        rank: schema.rank,
        scalars: schema.scalars.clone(),
        tensors: schema.tensors.iter().map(tensor).collect(),
    }
}

/// Builds an optimizer's record with the given state.
fn record(name: &str, states: Vec<NewParamState>) -> Result<OptimizerRecord, CheckpointError> {
    let failed = record_error(name);
    let mut tensors = Vec::new();
    for state in &states {
        let named = |tensor: &Tensor| {
            let mut tensor = tensor.clone();
            tensor.name = format!("{}.{}", state.id.val(), tensor.name);
            tensor.param_id = Some(state.id.val());
            tensor
        };
        tensors.extend(state.tensors.iter().map(named));
    }
    let mut writer = Writer::new(tensors);
    for state in &states {
        let id = state.id.val();
        writer = writer.with_scalar(&format!("{id}.{RANK}"), state.rank.into());
        for (name, scalar) in &state.scalars {
            writer = writer.with_scalar(&format!("{id}.{name}"), (*scalar).into());
        }
        writer = writer.with_metadata(&id.to_string(), &state.path);
    }
    drop(states);
    let bytes = writer.into_bytes().map_err(|error| failed(error.to_string()))?;
    OptimizerRecord::from_bytes(bytes).map_err(|error| failed(error.to_string()))
}

/// Returns the optimizer without the state of the parameters in `group`. The other state is shared,
/// not copied.
fn without(optimizer: &ModuleOptimizer, group: ParamGroup) -> ModuleOptimizer {
    // A parameter that moves to a new parameter group loses its state; the group's optimizer never
    // steps.
    optimizer.clone().with_group(group, SgdConfig::new().build(), None)
}

/// Splits the name of a record's entry, `{id}.{name}`.
fn split_name(name: &str) -> Option<(ParamId, &str)> {
    let (id, name) = name.split_once('.')?;
    Some((ParamId::from(id.parse::<u64>().ok()?), name))
}

fn unknown_entry(name: &str) -> String {
    format!("its record has an entry `{name}`, which names no parameter")
}

fn record_error(optimizer: &str) -> impl Fn(String) -> CheckpointError {
    let optimizer = optimizer.to_string();
    move |reason| CheckpointError::Record { optimizer: optimizer.clone(), reason }
}
