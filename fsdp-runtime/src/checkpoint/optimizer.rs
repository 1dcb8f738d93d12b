//! The state of any Burn optimizer, by parameter.
//!
//! Burn keeps it by parameter id, and gives it out as a record whose bytes are a burnpack: tensors
//! `{id}.{name}`, numbers `{id}.{name}`, and each parameter's path, which settles its group. The
//! record is taken in parts, so that no more than a part is ever held twice; and once the names in
//! it are known, out of the record itself, by handing it to an optimizer that keeps what it is given.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};

use burn::module::{ParamGroup, ParamId};
use burn::optim::{
    DynOptimizer, DynState, LearningRate, ModuleOptimizer, OptimizerRecord, SgdConfig, StateSink,
    StateSource,
};
use burn::tensor::kind::BridgeTensor;
use burn::tensor::{Bytes, DType, Device, TensorData};
use burn_pack::{Reader, Tensor, Writer};

use super::model::Model;
use super::scalar::{Scalar, Scalars};
use crate::error::{CheckpointError, Error};
use crate::fully_shard::Stats;
use crate::module::FsdpModule;

/// The number that Burn adds to each parameter's: its number of dimensions.
const RANK: &str = "__rank";

/// One tensor of an optimizer's state.
#[derive(Debug)]
pub(crate) struct StateTensor {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Bytes,
}

impl StateTensor {
    /// Its elements in its shape.
    pub(crate) fn into_data(self) -> TensorData {
        TensorData::from_bytes(self.bytes, self.shape, self.dtype)
    }
}

/// An optimizer's state of one parameter.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) scalars: Scalars,
    pub(crate) tensors: Vec<StateTensor>,
}

/// State to put into an optimizer.
pub(crate) struct NewState {
    pub(crate) id: ParamId,
    pub(crate) path: String,
    pub(crate) rank: usize,
    pub(crate) scalars: Scalars,
    /// Named as the optimizer names them.
    pub(crate) tensors: Vec<Tensor>,
}

/// What kind of state a parameter's is: the names in it, without the tensors' elements.
pub(crate) struct Kind {
    pub(crate) id: ParamId,
    pub(crate) path: String,
    pub(crate) rank: usize,
    pub(crate) scalars: Scalars,
    pub(crate) tensors: Vec<(String, DType)>,
}

/// The names of tensors and numbers that an optimizer has for its parameters, as far as seen.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names {
    tensors: BTreeSet<String>,
    scalars: BTreeSet<String>,
}

/// The state of the given parameters, where they have any.
pub(crate) fn read(
    name: &str,
    optimizer: &ModuleOptimizer,
    ids: &[ParamId],
    names: &mut Names,
) -> Result<HashMap<ParamId, State>, CheckpointError> {
    let others = ParamGroup::all().exclude(ParamGroup::from_ids(ids.to_vec()));
    let part = without(optimizer, others);
    if let Some(states) = take(part.to_record(), names) {
        return Ok(states);
    }
    let states = unpack(name, part.to_record())?;
    for state in states.values() {
        names.tensors.extend(state.tensors.iter().map(|tensor| tensor.name.clone()));
        names.scalars.extend(state.scalars.keys().cloned());
    }
    Ok(states)
}

/// A record's state without a copy; `None` where it has more than the names known.
fn take(record: OptimizerRecord, names: &Names) -> Option<HashMap<ParamId, State>> {
    // The record tells how many numbers it has in no other way.
    let text = format!("{record:?}");
    let scalars = text.split("num_scalars: ").nth(1)?.trim_end_matches(" }").parse::<usize>();
    let (tensors, scalars) = (record.len(), scalars.ok()?);
    if tensors + scalars > 0 && names.tensors.is_empty() && names.scalars.is_empty() {
        return None;
    }
    let keep = Keep { names: names.clone(), kept: Arc::default() };
    let kept = keep.kept.clone();
    SgdConfig::new().init().with_group(ParamGroup::all(), keep, None).load_record(record);
    let states = std::mem::take(&mut *kept.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
    let taken = |count: fn(&State) -> usize| states.values().map(count).sum::<usize>();
    // Each parameter has its number of dimensions besides.
    let all = taken(|state| state.tensors.len()) == tensors
        && taken(|state| state.scalars.len() + 1) == scalars;
    all.then_some(states)
}

/// Keeps the state that a record gives it, and never steps.
struct Keep {
    names: Names,
    kept: Arc<Mutex<HashMap<ParamId, State>>>,
}

impl DynOptimizer for Keep {
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
        let mut state = State::default();
        for name in &self.names.tensors {
            if let Some(data) = source.take_tensor(prefix, name) {
                let (bytes, shape, dtype) = data.into_parts();
                let (name, shape) = (name.clone(), shape.as_slice().to_vec());
                state.tensors.push(StateTensor { name, dtype, shape, bytes });
            }
        }
        for name in &self.names.scalars {
            if let Some(scalar) = source.take_scalar(prefix, name) {
                state.scalars.insert(name.clone(), scalar.into());
            }
        }
        self.kept.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(id, state);
        None
    }
}

/// A record's state by way of its bytes, whatever its names.
fn unpack(name: &str, record: OptimizerRecord) -> Result<HashMap<ParamId, State>, CheckpointError> {
    let failed = failed(name);
    let bytes = record.into_bytes().map_err(|error| failed(error.to_string()))?;
    let reader = Reader::from_bytes(bytes).map_err(|error| failed(error.to_string()))?;
    let mut states: HashMap<ParamId, State> = HashMap::new();
    for (name, value) in reader.scalars() {
        let (id, name) = split(name).ok_or_else(|| failed(unknown(name)))?;
        let state = states.entry(id).or_default();
        if name != RANK {
            state.scalars.insert(name.to_string(), Scalar::from(*value));
        }
    }
    for tensor in reader.into_tensors().map_err(|error| failed(error.to_string()))? {
        let (name, dtype, shape, _, bytes) =
            tensor.into_parts().map_err(|error| failed(error.to_string()))?;
        let (id, name) = split(&name).ok_or_else(|| failed(unknown(&name)))?;
        let (name, shape) = (name.to_string(), shape.as_slice().to_vec());
        states.entry(id).or_default().tensors.push(StateTensor { name, dtype, shape, bytes });
    }
    Ok(states)
}

/// Checks that an optimizer has state for none but the given parameters.
pub(crate) fn check_known(
    name: &str,
    optimizer: &ModuleOptimizer,
    ids: &[ParamId],
) -> Result<(), CheckpointError> {
    let rest = without(optimizer, ParamGroup::from_ids(ids.to_vec())).to_record();
    let bytes = rest.into_bytes().map_err(|error| failed(name)(error.to_string()))?;
    let rest = Reader::from_bytes(bytes).map_err(|error| failed(name)(error.to_string()))?;
    let count = rest.scalars().keys().filter(|name| name.ends_with(RANK)).count();
    if count == 0 {
        return Ok(());
    }
    Err(CheckpointError::ForeignState { optimizer: name.into(), count })
}

/// An optimizer of the same kind and groups with the given state.
pub(crate) fn with_state(
    name: &str,
    optimizer: &ModuleOptimizer,
    states: Vec<NewState>,
) -> Result<ModuleOptimizer, CheckpointError> {
    let record = record(name, states)?;
    Ok(optimizer.clone().load_record(record))
}

/// What the optimizer would not take, of state with these names, and what it would lack: found by
/// giving it one element of each.
pub(crate) fn differences(
    name: &str,
    optimizer: &ModuleOptimizer,
    kinds: &[Kind],
) -> Result<Vec<String>, CheckpointError> {
    let one = |(name, dtype): &(String, DType), rank: usize| {
        let bytes = Bytes::from_bytes_vec(vec![0; dtype.size()]);
        Tensor::new(name.clone(), *dtype, vec![1; rank], None, bytes)
    };
    let new = |kind: &Kind| NewState {
        id: kind.id,
        path: kind.path.clone(),
        rank: kind.rank,
        scalars: kind.scalars.clone(),
        tensors: kind.tensors.iter().map(|tensor| one(tensor, kind.rank)).collect(),
    };
    let taken = with_state(name, optimizer, kinds.iter().map(new).collect())?;
    let ids: Vec<_> = kinds.iter().map(|kind| kind.id).collect();
    let mut taken = read(name, &taken, &ids, &mut Names::default())?;
    let mut differences = Vec::new();
    for Kind { id, path, scalars, tensors, .. } in kinds {
        let Some(state) = taken.remove(id) else {
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

/// A record with the given state.
fn record(name: &str, states: Vec<NewState>) -> Result<OptimizerRecord, CheckpointError> {
    let failed = failed(name);
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

/// The optimizer without its state of a group of parameters. States are shared, not copied.
fn without(optimizer: &ModuleOptimizer, group: ParamGroup) -> ModuleOptimizer {
    // A new group takes no state over; its optimizer never steps.
    optimizer.clone().with_group(group, SgdConfig::new().build(), None)
}

fn split(name: &str) -> Option<(ParamId, &str)> {
    let (id, name) = name.split_once('.')?;
    Some((ParamId::from(id.parse::<u64>().ok()?), name))
}

fn unknown(name: &str) -> String {
    format!("its record has an entry `{name}`, which names no parameter")
}

fn failed(optimizer: &str) -> impl Fn(String) -> CheckpointError {
    let optimizer = optimizer.to_string();
    move |reason| CheckpointError::Record { optimizer: optimizer.clone(), reason }
}
impl<M: FsdpModule> Stats<'_, M> {
    /// Counts the tensors that `optimizer` holds for this model in [`memory`](Self::memory), one
    /// parameter after the other: none is held twice for it but those of one parameter. The state has
    /// its size after the first step.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Record`](crate::CheckpointError::Record) where Burn cannot
    /// tell what it holds.
    pub fn record_optimizer(&self, optimizer: &ModuleOptimizer) -> Result<(), Error> {
        let mut ids = Vec::new();
        Model::visit(self.model, &mut |held| ids.push(held.id));
        let (mut names, mut bytes) = (Names::default(), 0);
        for id in ids {
            let states = read("the optimizer", optimizer, &[id], &mut names)?;
            let tensors = states.values().flat_map(|state| &state.tensors);
            bytes += tensors.map(|tensor| tensor.bytes.len()).sum::<usize>();
        }
        self.model.engine.record_optimizer(bytes);
        Ok(())
    }
}
