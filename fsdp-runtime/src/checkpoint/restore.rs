//! Loading: what to load into, and the steps in which every rank does so or none.
//!
//! A rank reads the manifest, lists everything that differs from what it has, and compares the
//! checksums of the ranges it needs. Only when all ranks have found nothing wrong does any of them
//! change anything; then each parameter is read into its place, one after the other.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::ParamId;
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, DType};
use serde_json::Value;

use super::manifest::{
    Dtype, Manifest, ParameterEntry, Progress, TensorEntry, model_key, optimizer_key,
};
use super::model::{self, Model};
use super::optimizer::{self, Kind, NewState};
use super::ranks::Ranks;
use super::read::Folder;
use super::save::CheckpointManager;
use super::{folder, own, scheduler};
use crate::checkpoint::StateMut;
use crate::error::CheckpointError;
use crate::error::Error;
use crate::fully_shard::Fsdp;
use crate::launch::Worker;
use crate::module::FsdpModule;
use crate::module::ParamIndex;
use crate::optim::GradScaler;
use crate::optim::{WholeParam, owners};
use crate::param_group::{ParamSpec, Placement};

/// What to load a checkpoint into: a builder. Every rank names the same things.
///
/// What the checkpoint has beyond these is left where it is: a model is loaded for evaluation
/// without its optimizer. A model, an optimizer and a scheduler that are named must fit exactly.
#[derive(Default)]
#[must_use]
pub struct Restore<'a> {
    models: BTreeMap<String, &'a mut dyn Model>,
    optimizers: BTreeMap<String, LoadedOptimizer<'a>>,
    schedulers: BTreeMap<String, &'a mut ModuleLrScheduler>,
    scalers: BTreeMap<String, &'a mut GradScaler>,
}

/// An optimizer to load into.
struct LoadedOptimizer<'a> {
    optimizer: &'a mut ModuleOptimizer,
    /// Whether it steps matrices whole, each on its owner.
    whole: bool,
}

impl std::fmt::Debug for Restore<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Restore").field("models", &self.models.keys()).finish_non_exhaustive()
    }
}

/// What a checkpoint says beside its tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct Restored {
    /// Where the training stood.
    pub progress: Progress,
    /// The world size it was saved at.
    pub world_size: usize,
    /// What [`Checkpoint::value`](super::Checkpoint::value) added.
    pub values: BTreeMap<String, Value>,
}

impl<'a> Restore<'a> {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// A sharded model, by its name in the checkpoint. Its randomness goes on where it was; a rank
    /// that the saving world did not have goes on where rank 0 was.
    pub fn with_model<M: FsdpModule>(
        mut self,
        name: impl Into<String>,
        model: &'a mut Fsdp<M>,
    ) -> Self {
        self.models.insert(name.into(), model);
        self
    }

    /// An optimizer of any of the models added, before or after, with the groups it had.
    pub fn with_optimizer(
        mut self,
        name: impl Into<String>,
        optimizer: &'a mut ModuleOptimizer,
    ) -> Self {
        self.optimizers.insert(name.into(), LoadedOptimizer { optimizer, whole: false });
        self
    }

    /// An optimizer of whole matrices, of any of the models added: each owner reads the state of its
    /// own, whichever rank of whatever world wrote it, and under whatever strategy.
    pub fn with_whole_optimizer(
        mut self,
        name: impl Into<String>,
        optimizer: &'a mut WholeParam,
    ) -> Self {
        let optimizer = optimizer.inner_mut();
        self.optimizers.insert(name.into(), LoadedOptimizer { optimizer, whole: true });
        self
    }

    /// A learning-rate scheduler, built as the one that was saved.
    pub fn with_scheduler(
        mut self,
        name: impl Into<String>,
        scheduler: &'a mut ModuleLrScheduler,
    ) -> Self {
        self.schedulers.insert(name.into(), scheduler);
        self
    }

    /// A loss scaler: it goes on as the one that was saved, whatever its configuration was.
    pub fn with_grad_scaler(mut self, name: impl Into<String>, scaler: &'a mut GradScaler) -> Self {
        self.scalers.insert(name.into(), scaler);
        self
    }

    /// Loads a checkpoint's folder. Every rank calls it; on an error nothing has changed.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`] on the ranks it happened on, with every difference in one, and
    /// [`CollectiveError::PeerFailed`](crate::CollectiveError::PeerFailed) on the others.
    pub fn load(self, worker: &Worker, folder: impl AsRef<Path>) -> Result<Restored, Error> {
        load(self, &Ranks::from(worker), folder.as_ref())
    }
}

impl<M: FsdpModule> StateMut<'_, M> {
    /// Loads the model called `model` of a checkpoint folder, saved at any world size. Every rank
    /// calls it; on an error nothing has changed.
    ///
    /// # Errors
    ///
    /// As [`Restore::load`].
    pub fn load(&mut self, folder: impl AsRef<Path>) -> Result<Restored, Error> {
        let ranks = Ranks::from(&*self.model);
        load(Restore::new().with_model("model", self.model), &ranks, folder.as_ref())
    }
}

impl CheckpointManager {
    /// The newest complete checkpoint, as rank 0 sees it. Saves that did not complete are reported
    /// to the log and passed by. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`] when the root cannot be read.
    pub fn latest(&self) -> Result<Option<std::path::PathBuf>, Error> {
        let ranks = self.ranks();
        let listing =
            if ranks.leads() { folder::list(self.root()) } else { Ok(Default::default()) };
        let listing = ranks.settle("the checkpoints", listing)?;
        for torn in &listing.torn {
            tracing::warn!(target: "fsdp", path = %torn.display(), "a save that did not complete");
        }
        let latest = listing.complete.last().map(|(_, path)| path.clone());
        Ok((*ranks.exchange("the newest checkpoint", latest)?[0]).clone())
    }
}

fn load(restore: Restore<'_>, ranks: &Ranks, path: &Path) -> Result<Restored, Error> {
    let prepared =
        Folder::open(path).and_then(|folder| prepare(&restore, Arc::new(folder), ranks.index()));
    let Prepared { folder, mut wants, optimizers, schedulers, scalers, values } =
        ranks.settle("a checkpoint's checks", prepared)?;
    let manifest = folder.manifest();
    // Nothing was changed until here, and nothing from here on can be found wrong.
    let mut outcome = Ok(());
    for (name, model) in restore.models {
        let entry = &manifest.models[&name];
        let states = &entry.random;
        if let Some(state) = states.get(&ranks.index()).or_else(|| states.get(&0)) {
            model.engine().random().restore(state.seed, state.step);
        }
        let mut wants = wants.remove(&name).unwrap_or_default();
        model.fill(&mut |place, held, _| {
            let want = wants.remove(&place)?;
            let tensor = entry.tensors.get(&held.path)?;
            let range = stored_range(held, tensor, ranks.index());
            let data = folder.data(&want, tensor, range, held.base_shape());
            data.map_err(|error| outcome = Err(error)).ok()
        });
    }
    for (name, optimizer) in restore.optimizers {
        if let Some(loaded) = optimizers.get(&name) {
            *optimizer.optimizer = loaded.clone();
        }
    }
    for (name, scheduler) in restore.schedulers {
        if let Some(loaded) = schedulers.get(&name) {
            *scheduler = loaded.clone();
        }
    }
    for (name, scaler) in restore.scalers {
        if let Some(loaded) = scalers.get(&name) {
            *scaler = loaded.clone();
        }
    }
    // A file that was sound a moment ago and cannot be mapped now; every rank must hear of it.
    ranks.settle("a checkpoint's elements", outcome)?;
    Ok(Restored { progress: manifest.progress, world_size: manifest.world_size, values })
}

/// A load that will succeed.
struct Prepared {
    folder: Arc<Folder>,
    /// The tensor of each parameter that this rank holds something of, by model.
    wants: BTreeMap<String, HashMap<ParamIndex, String>>,
    optimizers: BTreeMap<String, ModuleOptimizer>,
    schedulers: BTreeMap<String, ModuleLrScheduler>,
    scalers: BTreeMap<String, GradScaler>,
    values: BTreeMap<String, Value>,
}

/// A parameter of a model to load into.
#[derive(Clone)]
struct Target<'a> {
    id: ParamId,
    place: ParamIndex,
    entry: &'a ParamSpec,
    dtype: DType,
    /// The rank that loads.
    rank: usize,
    /// Whether that rank owns a sharded matrix, for optimizers that step it whole.
    owned: bool,
}

fn prepare(
    restore: &Restore<'_>,
    folder: Arc<Folder>,
    rank: usize,
) -> Result<Prepared, CheckpointError> {
    let manifest = folder.manifest();
    let value = |(name, text): (&String, &String)| {
        let value = serde_json::from_str(text).map_err(|error| CheckpointError::NotAManifest {
            file: folder.name(),
            reason: format!("its value `{name}`: {error}"),
        });
        Ok((name.clone(), value?))
    };
    let values = manifest.values.iter().map(value).collect::<Result<_, CheckpointError>>()?;
    let mut differences = Vec::new();
    let mut targets: BTreeMap<&str, Vec<Target<'_>>> = BTreeMap::new();
    for (name, model) in &restore.models {
        let (units, mesh) = (model.engine().units(), model.engine().mesh());
        let owners = owners(units, mesh);
        let of_model = targets.entry(name).or_default();
        model.visit(&mut |model::Holding { id, place, dtype, .. }| {
            let owned = owners.get(&place) == Some(&mesh.shard_rank().index());
            of_model.push(Target { id, place, entry: model.entry(place), dtype, rank, owned });
        });
        compare_model(name, of_model, manifest, &mut differences);
    }
    for (name, optimizer) in &restore.optimizers {
        compare_optimizer(name, optimizer, &targets, manifest, &mut differences)?;
    }
    let mut schedulers = BTreeMap::new();
    for (name, own) in &restore.schedulers {
        let Some(numbers) = manifest.schedulers.get(name) else {
            differences.push(format!("missing: scheduler `{name}`"));
            continue;
        };
        match scheduler::with_scalars(own, numbers) {
            Ok(loaded) => _ = schedulers.insert(name.clone(), loaded),
            Err(found) => differences
                .extend(found.into_iter().map(|text| format!("scheduler `{name}`: {text}"))),
        }
    }
    let mut scalers = BTreeMap::new();
    for name in restore.scalers.keys() {
        let loaded = manifest.scalers.get(name).map(GradScaler::from_scalars);
        match loaded.unwrap_or(Err("it is missing".into())) {
            Ok(loaded) => _ = scalers.insert(name.clone(), loaded),
            Err(found) => differences.push(format!("loss scaler `{name}`: {found}")),
        }
    }
    if !differences.is_empty() {
        return Err(CheckpointError::Mismatch { folder: folder.name(), differences });
    }

    let mut wants: BTreeMap<String, HashMap<ParamIndex, String>> = BTreeMap::new();
    for (model, targets) in &targets {
        let wants = wants.entry(model.to_string()).or_default();
        for target in targets.iter().filter(|target| !target.entry.range().is_empty()) {
            let path = &target.entry.path;
            let key = model_key(model, path);
            let tensor = &manifest.models[*model].tensors[path];
            folder.verify(&key, tensor, stored_range(target.entry, tensor, rank))?;
            wants.insert(target.place, key);
        }
    }
    let mut optimizers = BTreeMap::new();
    for (name, own) in &restore.optimizers {
        let states = states(name, own.whole, &targets, &folder)?;
        optimizers.insert(name.clone(), optimizer::with_state(name, own.optimizer, states)?);
    }
    Ok(Prepared { wants, optimizers, schedulers, scalers, values, folder: folder.clone() })
}

fn compare_model(
    name: &str,
    targets: &[Target<'_>],
    manifest: &Manifest,
    differences: &mut Vec<String>,
) {
    let Some(model) = manifest.models.get(name) else {
        return differences.push(format!("missing: model `{name}`"));
    };
    for target in targets {
        let path = &target.entry.path;
        let Some(found) = model.tensors.get(path) else {
            differences.push(format!("missing: `{path}` of model `{name}`"));
            continue;
        };
        if found.shape != target.entry.shape {
            let expected = &target.entry.shape;
            differences.push(format!(
                "misshapen: `{path}` of model `{name}` is {:?} in the checkpoint, {expected:?} in \
                 the model",
                found.shape
            ));
        }
        if Dtype::of(target.dtype) != Some(found.dtype) {
            differences.push(format!(
                "of another dtype: `{path}` of model `{name}` is {:?} in the checkpoint, {:?} in \
                 the model",
                found.dtype, target.dtype
            ));
        }
    }
    let known = |path: &String| targets.iter().any(|target| target.entry.path == *path);
    let unexpected = model.tensors.keys().filter(|path| !known(path));
    differences.extend(unexpected.map(|path| format!("unexpected: `{path}` of model `{name}`")));
}

fn compare_optimizer(
    name: &str,
    own: &LoadedOptimizer<'_>,
    targets: &BTreeMap<&str, Vec<Target<'_>>>,
    manifest: &Manifest,
    differences: &mut Vec<String>,
) -> Result<(), CheckpointError> {
    let Some(found) = manifest.optimizers.get(name) else {
        differences.push(format!("missing: optimizer `{name}`"));
        return Ok(());
    };
    let mut kinds = Vec::new();
    for (model, parameters) in &found.models {
        let Some(targets) = targets.get(model.as_str()) else {
            differences
                .push(format!("optimizer `{name}` has state of model `{model}`; load it as well"));
            continue;
        };
        for target in targets {
            let Some(state) = parameters.get(&target.entry.path) else { continue };
            for (tensor, stored) in &state.tensors {
                if part(target, stored, own.whole).is_none() {
                    differences.push(format!(
                        "optimizer `{name}`: `{tensor}` of `{}` is {:?}, which cannot be \
                         sharded; wrap the optimizer in `WholeParam` and use `whole_optimizer`",
                        target.entry.path, stored.shape
                    ));
                }
            }
            let of = |(name, stored): (&String, &TensorEntry)| (name.clone(), stored.dtype.burn());
            kinds.push(Kind {
                id: target.id,
                path: target.entry.path.clone(),
                rank: target.entry.shape.len(),
                scalars: state.scalars.clone(),
                tensors: state.tensors.iter().map(of).collect(),
            });
        }
    }
    differences.extend(optimizer::differences(name, own.optimizer, &kinds)?);
    Ok(())
}

/// Where the elements that a rank holds of a parameter lie among those of the checkpoint.
fn stored_range(entry: &ParamSpec, stored: &TensorEntry, rank: usize) -> Range<usize> {
    let first = own::first_element(entry, stored, rank);
    first + entry.range().start..first + entry.range().end
}

/// The elements that a rank needs of an optimizer's tensor for a parameter, and their shape: the
/// parameter's own, or all of a tensor, where the parameter is whole or is stepped `whole`.
fn part(
    target: &Target<'_>,
    stored: &TensorEntry,
    whole: bool,
) -> Option<(Range<usize>, Vec<usize>)> {
    let entry = target.entry;
    let sharded = matches!(entry.held, Placement::Shard(_)) && !whole;
    if sharded {
        let range = stored_range(entry, stored, target.rank);
        return (stored.shape == entry.shape).then(|| (range, entry.base_shape()));
    }
    let first = own::first_element(entry, stored, target.rank);
    let fits = stored.shape.len() == entry.shape.len();
    let numel = stored.numel().filter(|_| fits)?;
    Some((first..first + numel, stored.shape.clone()))
}

/// Whether this rank has state of a parameter.
fn steps(target: &Target<'_>, whole: bool) -> bool {
    match target.entry.held {
        Placement::Shard(_) if whole => target.owned,
        // A rank that holds nothing of a parameter never steps it.
        _ => !target.entry.range().is_empty(),
    }
}

/// An optimizer's state for what this rank steps, verified, to be read when it is taken.
fn states(
    name: &str,
    whole: bool,
    targets: &BTreeMap<&str, Vec<Target<'_>>>,
    folder: &Arc<Folder>,
) -> Result<Vec<NewState>, CheckpointError> {
    let mut states = Vec::new();
    for (model, parameters) in &folder.manifest().optimizers[name].models {
        for target in targets.get(model.as_str()).into_iter().flatten() {
            let path = &target.entry.path;
            let Some(state) = parameters.get(path) else { continue };
            if !steps(target, whole) {
                continue;
            }
            let ParameterEntry { scalars, tensors } = state;
            let mut new = NewState {
                id: target.id,
                path: path.clone(),
                rank: target.entry.shape.len(),
                scalars: scalars.clone(),
                tensors: Vec::new(),
            };
            for (tensor, stored) in tensors {
                let key = optimizer_key(name, model, path, tensor);
                let Some((range, shape)) = part(target, stored, whole) else { continue };
                folder.verify(&key, stored, range.clone())?;
                new.tensors.push(deferred(tensor, key, stored, range, shape, folder));
            }
            states.push(new);
        }
    }
    Ok(states)
}

/// A tensor that is read from the folder when a record is put together.
fn deferred(
    name: &str,
    key: String,
    stored: &TensorEntry,
    range: Range<usize>,
    shape: Vec<usize>,
    folder: &Arc<Folder>,
) -> burn_pack::Tensor {
    let (folder, stored) = (folder.clone(), stored.clone());
    let (dtype, len) = (stored.dtype.burn(), range.len() * stored.dtype.size());
    let read = move || {
        let mut bytes = vec![0; len];
        folder
            .read(&key, &stored, range.clone(), &mut bytes)
            .map_err(|error| burn_pack::Error::IoError(error.to_string()))?;
        Ok(Bytes::from_bytes_vec(bytes))
    };
    burn_pack::Tensor::deferred(name.to_string(), dtype, shape, None, len, read)
}
