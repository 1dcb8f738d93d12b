//! One rank's part of a save: which elements of what it writes, and its part of the manifest.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use burn::module::ParamId;

use super::manifest::{KeyEntry, Manifest, ModelEntry, RandomState, UnitEntry};
use super::model::Model;
use super::own::Differing;
use super::ranks::{Ranks, arrangement, written, written_owned, written_whole};
use super::save::{Checkpoint, SavedOptimizer};
use super::sink::{Elements, Owner, Part, Sink};
use super::{io, model, optimizer};
use crate::error::CheckpointError;
use crate::layout::Mesh;
use crate::module::ParamIndex;
use crate::optim::owners;
use crate::param_group::plan::Key;
use crate::param_group::{ParamSpec, Placement};

/// About how many bytes of parameters have their optimizer state read at once, at least: few, so that
/// the next copies use the memory of the last, which is in the cache still.
const BATCH: usize = 4 << 20;
/// About how often an optimizer's state is read, at most: each time looks at all of its parameters.
const BATCHES: usize = 256;

/// This rank's part of the manifest, without tensors.
pub(crate) fn outline(checkpoint: &Checkpoint<'_>, ranks: &Ranks) -> Manifest {
    let mut manifest = Manifest::new(ranks.mesh.world, checkpoint.progress);
    for (name, model) in &checkpoint.models {
        let engine = model.engine();
        let units = engine.units().iter().map(|unit| UnitEntry {
            path: unit.path.clone(),
            level: unit.level,
            parameters: unit.entries.iter().map(|entry| entry.path.clone()).collect(),
        });
        let random = RandomState { seed: engine.random().seed(), step: engine.random().step() };
        manifest.models.insert(
            name.clone(),
            ModelEntry {
                strategy: engine.strategy().to_string(),
                mesh: arrangement(engine.mesh()),
                units: units.collect(),
                tensors: Default::default(),
                random: [(ranks.index(), random)].into(),
                keys: keys(*model),
            },
        );
    }
    for name in checkpoint.optimizers.keys() {
        manifest.optimizers.insert(name.clone(), Default::default());
    }
    manifest.schedulers = checkpoint.schedulers.clone();
    manifest.scalers = checkpoint.scalers.clone();
    manifest.values = checkpoint.values.clone();
    manifest
}

/// The names that differ from the module's paths.
fn keys(model: &dyn Model) -> BTreeMap<String, KeyEntry> {
    let sharded = model.keys().iter().map(|(place, key)| (model.entry(*place), key));
    let ignored = model.ignored().iter().map(|ignored| (&ignored.entry, &ignored.key));
    let of = |(entry, key): (&ParamSpec, &Key)| {
        let other = key.transposed || key.name != entry.path;
        let owns = !matches!(entry.held, Placement::TiedTo(_));
        let Key { name, transposed } = key.clone();
        (other && owns).then(|| (entry.path.clone(), KeyEntry { name, transposed }))
    };
    sharded.chain(ignored).filter_map(of).collect()
}

/// Gives `sink` all that this rank writes: the models' parameters, then the optimizers' state.
pub(crate) fn parts(
    checkpoint: &Checkpoint<'_>,
    differing: &Differing,
    sink: &mut dyn Sink,
) -> Result<(), CheckpointError> {
    let mut parameters = Vec::new();
    for (name, model) in &checkpoint.models {
        let mut outcome = Ok(());
        model.visit(&mut |held| {
            if outcome.is_err() {
                return;
            }
            parameters.push(Parameter { id: held.id, name, model: *model, place: held.place });
            outcome = parameter(name, *model, held, differing, sink);
        });
        outcome?;
    }
    let ids: Vec<ParamId> = parameters.iter().map(|parameter| parameter.id).collect();
    for (name, SavedOptimizer { optimizer, whole }) in &checkpoint.optimizers {
        optimizer::check_known(name, optimizer, &ids)?;
        let owners = |model: &dyn Model| owners(model.engine().units(), model.engine().mesh());
        let owners: BTreeMap<&String, _> = match whole {
            true => checkpoint.models.iter().map(|(name, model)| (name, owners(*model))).collect(),
            false => BTreeMap::new(),
        };
        // The names in a state are learnt from the smallest, which costs copies of it.
        let mut names = optimizer::Names::default();
        if let Some(smallest) = parameters.iter().min_by_key(|parameter| parameter.held()) {
            optimizer::read(name, optimizer, &[smallest.id], &mut names)?;
        }
        for batch in batches(&parameters) {
            let ids: Vec<ParamId> = batch.iter().map(|parameter| parameter.id).collect();
            let mut states = optimizer::read(name, optimizer, &ids, &mut names)?;
            for parameter in batch {
                if let Some(state) = states.remove(&parameter.id) {
                    let owners = owners.get(parameter.name);
                    let owner = owners.and_then(|owners| owners.get(&parameter.place));
                    self::state(name, parameter, owner.copied(), state, differing, sink)?;
                }
            }
        }
    }
    Ok(())
}

/// A parameter of a model that is saved.
struct Parameter<'a> {
    id: ParamId,
    /// The model's name.
    name: &'a String,
    model: &'a dyn Model,
    place: ParamIndex,
}

impl Parameter<'_> {
    /// Elements that this rank holds of it; the most where it holds none.
    fn held(&self) -> usize {
        self.model.entry(self.place).range().len().wrapping_sub(1)
    }
}

/// The parameters in groups of about [`BATCH`] bytes or more.
fn batches<'a, 'b>(mut rest: &'b [Parameter<'a>]) -> impl Iterator<Item = &'b [Parameter<'a>]> {
    let bytes_of = |parameter: &Parameter<'_>| {
        parameter.model.entry(parameter.place).range().len() * size_of::<f32>()
    };
    let enough = BATCH.max(rest.iter().map(bytes_of).sum::<usize>() / BATCHES);
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let count = rest.iter().take_while(|parameter| {
            let before = bytes;
            bytes += bytes_of(parameter);
            before < enough
        });
        let (batch, after) = rest.split_at(count.count());
        rest = after;
        (!batch.is_empty()).then_some(batch)
    })
}

/// The part of a parameter that this rank writes.
fn parameter(
    name: &str,
    model: &dyn Model,
    held: model::Holding,
    differing: &Differing,
    sink: &mut dyn Sink,
) -> Result<(), CheckpointError> {
    let (engine, entry) = (&**model.engine(), model.entry(held.place));
    let owner = Owner::Model { model: name.into(), path: entry.path.clone() };
    let written = match own_copy(&owner, entry, entry.numel(), engine.mesh(), differing) {
        Some(written) => written,
        None => {
            let range = written(engine.mesh(), held.place, entry);
            let from = range.start.saturating_sub(entry.range().start);
            Written { copies: 1, range, from }
        }
    };
    let mut outcome = Ok(());
    let (dtype, size) = (held.dtype, held.dtype.size());
    model::with_bytes(engine, entry, held.base, &mut |bytes| {
        let Written { copies, range, from } = written.clone();
        outcome = sink.part(Part {
            owner: owner.clone(),
            dtype,
            shape: entry.shape.clone(),
            copies,
            bytes: Elements::Borrowed(&bytes[from * size..(from + range.len()) * size]),
            range,
        });
    });
    outcome
}

/// What a rank writes of a tensor.
#[derive(Clone, Debug)]
struct Written {
    copies: usize,
    /// The elements, counted over all copies.
    range: Range<usize>,
    /// The first of them, counted in what this rank holds.
    from: usize,
}

/// All of this rank's own, where every rank writes its own.
fn own_copy(
    owner: &Owner,
    entry: &ParamSpec,
    numel: usize,
    mesh: Mesh,
    differing: &Differing,
) -> Option<Written> {
    let own = entry.held == Placement::PerRank && differing.contains(&owner.key());
    let first = mesh.rank.index() * numel;
    own.then(|| Written { copies: mesh.world.size(), range: first..first + numel, from: 0 })
}

/// The part of a parameter's optimizer state that this rank writes. `owner` is who has all state of
/// a sharded matrix, where it is not sharded itself.
fn state(
    optimizer: &str,
    parameter: &Parameter<'_>,
    owner: Option<usize>,
    state: optimizer::State,
    differing: &Differing,
    sink: &mut dyn Sink,
) -> Result<(), CheckpointError> {
    let Parameter { name: model, place, .. } = *parameter;
    let (mesh, entry) = (parameter.model.engine().mesh(), parameter.model.entry(place));
    sink.scalars(optimizer, model, &entry.path, state.scalars);
    for tensor in state.tensors {
        let numel = tensor.shape.iter().product();
        let belongs = Owner::Optimizer {
            optimizer: optimizer.into(),
            model: model.into(),
            path: entry.path.clone(),
            name: tensor.name,
        };
        let named = || format!("{}: {}", entry.path, belongs.key());
        let written = match (&entry.held, owner) {
            (Placement::Shard(_), Some(owner)) => {
                let rank = mesh.shard_rank().index();
                if rank != owner {
                    let tensor = named();
                    return Err(CheckpointError::MisplacedState { tensor, rank, owner });
                }
                let range = written_owned(mesh, numel);
                Written { copies: 1, from: range.start, range }
            }
            (Placement::Shard(held), None) => {
                // A rank that holds nothing of a parameter never steps it.
                if tensor.shape != entry.base_shape() || held.is_empty() {
                    return Err(CheckpointError::NotElementwise {
                        tensor: named(),
                        expected: entry.base_shape(),
                        found: tensor.shape,
                    });
                }
                let range = written(mesh, place, entry);
                let from = range.start.saturating_sub(held.start);
                Written { copies: 1, range, from }
            }
            _ => own_copy(&belongs, entry, numel, mesh, differing).unwrap_or_else(|| {
                let range = written_whole(mesh, place, numel);
                Written { copies: 1, from: range.start, range }
            }),
        };
        let Written { copies, range, from } = written;
        // A shard's state has the full parameter's shape.
        let shape = match owner {
            None if tensor.shape == entry.base_shape() => entry.shape.clone(),
            _ => tensor.shape,
        };
        let size = tensor.dtype.size();
        let bytes = from * size..(from + range.len()) * size;
        sink.part(Part {
            owner: belongs,
            dtype: tensor.dtype,
            shape,
            copies,
            range,
            bytes: Elements::Copied(tensor.bytes, bytes),
        })?;
    }
    Ok(())
}

/// Where a rank leaves its part of the manifest for the one that puts them together.
pub(crate) fn part_file(rank: usize) -> String {
    format!("rank-{rank:05}.part.json")
}

/// Leaves this rank's part of the manifest in the folder, all at once.
pub(crate) fn leave_part(
    folder: &Path,
    rank: usize,
    manifest: &Manifest,
) -> Result<(), CheckpointError> {
    let path = folder.join(part_file(rank));
    let aside = path.with_extension("new");
    std::fs::write(&aside, manifest.to_body()).map_err(io("write", &aside))?;
    std::fs::rename(&aside, &path).map_err(io("write", &path))
}

/// Puts the ranks' parts together.
pub(crate) fn gather_parts(folder: &Path, world: usize) -> Result<Manifest, CheckpointError> {
    let mut whole: Option<Manifest> = None;
    for rank in 0..world {
        let path = folder.join(part_file(rank));
        let text = std::fs::read(&path).map_err(io("read", &path))?;
        let part: Manifest = serde_json::from_slice(&text).map_err(|error| {
            let (file, reason) = (path.display().to_string(), error.to_string());
            CheckpointError::NotAManifest { file, reason }
        })?;
        match &mut whole {
            None => whole = Some(part),
            Some(whole) => whole.merge(part, rank),
        }
    }
    let whole = whole.ok_or_else(|| CheckpointError::NoCheckpoint {
        folder: folder.display().to_string(),
        torn: Vec::new(),
    })?;
    whole.check(&folder.display().to_string())?;
    Ok(whole)
}

/// Whether every rank has left its part.
pub(crate) fn missing_part(folder: &Path, world: usize) -> Option<usize> {
    (0..world).find(|&rank| !folder.join(part_file(rank)).exists())
}
