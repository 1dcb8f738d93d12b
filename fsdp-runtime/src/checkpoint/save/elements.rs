//! The tensors' elements that one rank writes: of models' parameters, and of optimizers' state.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use burn::module::ParamId;
use burn::tensor::DType;

use super::contents::{Checkpoint, SavedOptimizer};
use super::per_rank::DifferingTensors;
use super::sink::{PartBytes, Sink, TensorOwner, TensorPart};
use super::written_range::{written_of_owned, written_of_param, written_of_replicated};
use crate::checkpoint::manifest::SplitEntry;
use crate::checkpoint::optimizer_state::{self, ParamState, StateNames, StateTensor};
use crate::checkpoint::sharded_model::{LocalParam, ShardedModel, with_host_bytes};
use crate::error::CheckpointError;
use crate::fully_shard::optimizer_probe::Part;
use crate::layout::Mesh;
use crate::module::ParamIndex;
use crate::optim::owners;
use crate::param_group::{ParamSpec, Placement};

/// Minimum size of a batch of parameters whose optimizer state is read at once, in bytes of their
/// f32 values. Small batches let the copies of the next batch reuse memory that is still in the
/// processor's cache.
const BATCH_BYTES: usize = 4 << 20;
/// Maximum number of batches, approximately. Reading a batch costs a pass over all of an
/// optimizer's parameters.
const MAX_BATCHES: usize = 256;

/// Gives `sink` everything that this rank writes: the models' parameters, then the optimizers'
/// state.
pub(super) fn write_elements(
    checkpoint: &Checkpoint<'_>,
    differing: &DifferingTensors,
    sink: &mut dyn Sink,
) -> Result<(), CheckpointError> {
    let mut params = Vec::new();
    for (name, model) in &checkpoint.models {
        let mut outcome = Ok(());
        model.for_each_param(&mut |param| {
            if outcome.is_err() {
                return;
            }
            if !checkpoint.averages.contains(name) {
                params.push(SavedParam {
                    id: param.id,
                    model_name: name,
                    model: *model,
                    index: param.index,
                });
            }
            outcome = write_param(name, *model, param, differing, sink);
        });
        outcome?;
    }
    for (name, saved) in &checkpoint.optimizers {
        let owners = match saved.whole {
            true => matrix_owners(checkpoint),
            false => BTreeMap::new(),
        };
        write_optimizer(name, saved, &params, &owners, differing, sink)?;
    }
    Ok(())
}

/// Owner of each sharded matrix, as a rank of the matrix's shard group, by model name.
type MatrixOwners<'a> = BTreeMap<&'a String, HashMap<ParamIndex, usize>>;

fn matrix_owners<'a>(checkpoint: &'a Checkpoint<'_>) -> MatrixOwners<'a> {
    let of_model =
        |model: &dyn ShardedModel| owners(model.schedule().units(), model.schedule().mesh());
    checkpoint.models.iter().map(|(name, model)| (name, of_model(*model))).collect()
}

/// A parameter of a model that is saved.
struct SavedParam<'a> {
    id: ParamId,
    model_name: &'a String,
    model: &'a dyn ShardedModel,
    index: ParamIndex,
}

impl SavedParam<'_> {
    /// Returns the number of elements that this rank stores.
    fn numel(&self) -> usize {
        self.model.spec(self.index).range().len()
    }
}

/// Writes this rank's part of an optimizer's state for `params`.
fn write_optimizer(
    name: &str,
    saved: &SavedOptimizer<'_>,
    params: &[SavedParam<'_>],
    owners: &MatrixOwners<'_>,
    differing: &DifferingTensors,
    sink: &mut dyn Sink,
) -> Result<(), CheckpointError> {
    let optimizer = saved.optimizer;
    let ids = params.iter().map(|param| param.id);
    // The check of the optimizer leaves state of its probes, which is not saved.
    let probes = params.iter().flat_map(|param| Part::ALL.map(|part| part.id(param.id)));
    let known: Vec<ParamId> = ids.chain(probes).collect();
    optimizer_state::check_no_other_state(name, optimizer, &known)?;
    // The first read learns the names in the state and copies tensors to do so: take the smallest
    // parameter that has elements here (`wrapping_sub` puts those without elements last).
    let mut names = StateNames::default();
    if let Some(smallest) = params.iter().min_by_key(|param| param.numel().wrapping_sub(1)) {
        optimizer_state::read(name, optimizer, &[smallest.id], &mut names)?;
    }
    for batch in batches(params) {
        let ids: Vec<ParamId> = batch.iter().map(|param| param.id).collect();
        let mut states = optimizer_state::read(name, optimizer, &ids, &mut names)?;
        for param in batch {
            if let Some(state) = states.remove(&param.id) {
                let owner = owners.get(param.model_name);
                let owner = owner.and_then(|owners| owners.get(&param.index)).copied();
                write_state(name, param, owner, state, differing, sink)?;
            }
        }
    }
    Ok(())
}

/// Divides the parameters into batches of [`BATCH_BYTES`] or more.
fn batches<'a, 'b>(mut params: &'b [SavedParam<'a>]) -> impl Iterator<Item = &'b [SavedParam<'a>]> {
    let bytes_of = |param: &SavedParam<'_>| param.numel() * size_of::<f32>();
    let enough = BATCH_BYTES.max(params.iter().map(bytes_of).sum::<usize>() / MAX_BATCHES);
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let count = params.iter().take_while(|param| {
            let before = bytes;
            bytes += bytes_of(param);
            before < enough
        });
        let (batch, after) = params.split_at(count.count());
        params = after;
        (!batch.is_empty()).then_some(batch)
    })
}

/// Elements of a tensor that this rank writes.
#[derive(Clone, Debug)]
struct Written {
    /// Number of copies of the tensor in the checkpoint.
    copies: usize,
    /// Range of elements that this rank writes, counted over all copies.
    range: Range<usize>,
    /// Position of the first of these elements among the elements that this rank stores.
    from: usize,
}

/// Returns this rank's whole copy of an ignored parameter's tensor, where the ranks' values differ.
fn own_copy(
    owner: &TensorOwner,
    spec: &ParamSpec,
    numel: usize,
    mesh: Mesh,
    differing: &DifferingTensors,
) -> Option<Written> {
    let own = spec.placement == Placement::PerRank && differing.contains(&owner.key());
    let mesh = mesh.of_all_ranks();
    let first = mesh.rank.index() * numel;
    own.then(|| Written { copies: mesh.world.size(), range: first..first + numel, from: 0 })
}

/// Returns how a parameter is split among tensor parallel ranks, and the number of this rank's part.
fn split_of(spec: &ParamSpec) -> Option<(SplitEntry, usize)> {
    let split = spec.split?;
    Some((SplitEntry { dim: split.dim, parts: split.parts }, split.part))
}

/// Returns the elements of a parameter's tensor that this rank writes, given those that it writes for its
/// data parallel ranks: of a whole parameter none, but on the first of its tensor parallel ranks.
fn of_tensor_rank(range: Range<usize>, spec: &ParamSpec, mesh: Mesh) -> Range<usize> {
    match spec.split.is_some() || mesh.tensor_rank() == 0 {
        true => range,
        false => range.start..range.start,
    }
}

/// Writes this rank's part of a parameter.
fn write_param(
    model_name: &str,
    model: &dyn ShardedModel,
    param: LocalParam,
    differing: &DifferingTensors,
    sink: &mut dyn Sink,
) -> Result<(), CheckpointError> {
    let (schedule, spec) = (&**model.schedule(), model.spec(param.index));
    let owner = TensorOwner::Model { model: model_name.into(), path: spec.path.clone() };
    let own = own_copy(&owner, spec, spec.numel(), schedule.mesh(), differing);
    let Written { copies, range, from } = own.unwrap_or_else(|| {
        let range = written_of_param(schedule.mesh(), param.index, spec);
        let range = of_tensor_rank(range, spec, schedule.mesh());
        let from = range.start.saturating_sub(spec.stored_range().start);
        Written { copies: 1, range, from }
    });
    let mut outcome = Ok(());
    let codes = spec.storage.codes();
    let dtype = if codes.is_some() { DType::U32 } else { param.dtype };
    let size = dtype.size();
    with_host_bytes(schedule, spec, param.base, &mut |bytes| {
        outcome = sink.tensor(TensorPart {
            owner: owner.clone(),
            dtype,
            codes,
            shape: spec.whole_shape(),
            split: split_of(spec),
            copies,
            range: range.clone(),
            bytes: PartBytes::Borrowed(&bytes[from * size..(from + range.len()) * size]),
        });
    });
    outcome
}

/// Writes this rank's part of an optimizer's state for a parameter. `owner` is the rank in the
/// shard group that has the state of a sharded matrix in full; `None` where the state is sharded.
fn write_state(
    optimizer: &str,
    param: &SavedParam<'_>,
    owner: Option<usize>,
    state: ParamState,
    differing: &DifferingTensors,
    sink: &mut dyn Sink,
) -> Result<(), CheckpointError> {
    let (model, spec) = (param.model_name, param.model.spec(param.index));
    sink.scalars(optimizer, model, &spec.path, state.scalars);
    for tensor in state.tensors {
        let owned_by = TensorOwner::Optimizer {
            optimizer: optimizer.into(),
            model: model.into(),
            path: spec.path.clone(),
            name: tensor.name.clone(),
        };
        let Written { copies, range, from } =
            written_of_state(param, owner, &tensor, &owned_by, differing)?;
        // A shard's state is saved as part of a tensor of the full parameter's shape.
        let (shape, split) = match owner {
            None if tensor.shape == spec.base_shape() => (spec.whole_shape(), split_of(spec)),
            _ => (tensor.shape, None),
        };
        let size = tensor.dtype.size();
        let bytes = from * size..(from + range.len()) * size;
        sink.tensor(TensorPart {
            owner: owned_by,
            dtype: tensor.dtype,
            codes: None,
            shape,
            split,
            copies,
            range,
            bytes: PartBytes::Copied(tensor.bytes, bytes),
        })?;
    }
    Ok(())
}

/// Returns the elements that this rank writes of one tensor of an optimizer's state.
///
/// # Errors
///
/// [`CheckpointError::MisplacedState`] for full state of a matrix on another rank than the owner,
/// and [`CheckpointError::NotElementwise`] for state of a shard that has another shape than the
/// shard.
fn written_of_state(
    param: &SavedParam<'_>,
    owner: Option<usize>,
    tensor: &StateTensor,
    owned_by: &TensorOwner,
    differing: &DifferingTensors,
) -> Result<Written, CheckpointError> {
    let (mesh, spec) = (param.model.schedule().mesh(), param.model.spec(param.index));
    let numel = tensor.shape.iter().product();
    let name = || format!("{}: {}", spec.path, owned_by.key());
    match (&spec.placement, owner) {
        (Placement::Shard(_), Some(owner)) => {
            let rank = mesh.shard_rank().index();
            if rank != owner {
                return Err(CheckpointError::MisplacedState { tensor: name(), rank, owner });
            }
            let range = written_of_owned(mesh, numel);
            Ok(Written { copies: 1, from: range.start, range })
        }
        (Placement::Shard(shard), None) => {
            // A rank with an empty shard never steps the parameter, and so has no valid state of
            // it.
            if tensor.shape != spec.base_shape() || shard.is_empty() {
                return Err(CheckpointError::NotElementwise {
                    tensor: name(),
                    expected: spec.base_shape(),
                    found: tensor.shape.clone(),
                });
            }
            let range = written_of_param(mesh, param.index, spec);
            let range = of_tensor_rank(range, spec, mesh);
            let from = range.start.saturating_sub(shard.start);
            Ok(Written { copies: 1, range, from })
        }
        _ if spec.split.is_some() && tensor.shape != spec.base_shape() => {
            Err(CheckpointError::NotElementwise {
                tensor: name(),
                expected: spec.base_shape(),
                found: tensor.shape.clone(),
            })
        }
        _ => Ok(own_copy(owned_by, spec, numel, mesh, differing).unwrap_or_else(|| {
            let range = written_of_replicated(mesh, param.index, numel);
            let range = of_tensor_rank(range, spec, mesh);
            Written { copies: 1, from: range.start, range }
        })),
    }
}
