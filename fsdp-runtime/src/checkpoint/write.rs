//! One rank's part of a save: its pieces, to a file at once or to memory first.

use std::ops::Range;
use std::path::Path;

use burn::module::ParamId;
use burn::tensor::{Bytes, DType};

use super::CheckpointError;
use super::manifest::{
    Dtype, Manifest, ModelEntry, ParameterEntry, Piece, RandomState, TensorEntry, UnitEntry,
    model_key, optimizer_key, rank_file,
};
use super::ranks::{Ranks, arrangement, written, written_whole};
use super::save::Checkpoint;
use super::scalar::Scalars;
use super::{io, model, optimizer, rank_file};
use crate::group::{Entry, Held};
use crate::mesh::Mesh;
use crate::param::Place;
use crate::schedule::Engine;

/// About how many bytes of parameters have their optimizer state read at once.
const BATCH: usize = 32 << 20;

/// Where a tensor belongs in a manifest.
#[derive(Clone, Debug)]
pub(crate) enum Owner {
    Model { model: String, path: String },
    Optimizer { optimizer: String, model: String, path: String, name: String },
}

/// Elements that this rank writes.
pub(crate) struct Part<'a> {
    pub(crate) owner: Owner,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) range: Range<usize>,
    pub(crate) bytes: Elements<'a>,
}

/// Their bytes.
pub(crate) enum Elements<'a> {
    /// The tensor's own memory.
    Borrowed(&'a [u8]),
    /// A copy that was made already, and the bytes of it that are meant.
    Copied(Bytes, Range<usize>),
}

impl Elements<'_> {
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Copied(bytes, range) => &bytes[range.clone()],
        }
    }
}

/// What takes the parts of a save.
pub(crate) trait Sink {
    /// Takes a part.
    fn part(&mut self, part: Part<'_>) -> Result<(), CheckpointError>;
    /// Takes an optimizer's numbers for a parameter.
    fn scalars(&mut self, optimizer: &str, model: &str, path: &str, scalars: Scalars);
}

/// A rank's file and its part of the manifest, as they are written.
pub(crate) struct FileSink {
    file: rank_file::Writer,
    manifest: Manifest,
    rank: usize,
}

impl FileSink {
    /// Creates the file of a rank in `folder`. `manifest` has all but the tensors.
    pub(crate) fn create(
        folder: &Path,
        rank: usize,
        manifest: Manifest,
    ) -> Result<Self, CheckpointError> {
        // The path, and the numbers around it; optimizers keep two or three tensors a parameter.
        let paths = manifest.models.values().flat_map(|model| &model.units);
        let paths = paths.flat_map(|unit| &unit.parameters);
        let names: usize = paths.map(|path| path.len() + 160).sum();
        let names = names * (1 + 4 * manifest.optimizers.len());
        let file = rank_file::Writer::create(folder.join(rank_file(rank)), names)?;
        Ok(Self { file, manifest, rank })
    }

    /// Ends the file; returns this rank's part of the manifest.
    pub(crate) fn finish(self) -> Result<Manifest, CheckpointError> {
        let Self { file, mut manifest, rank } = self;
        manifest.files[rank] = file.finish()?;
        Ok(manifest)
    }
}

impl Sink for FileSink {
    fn part(&mut self, part: Part<'_>) -> Result<(), CheckpointError> {
        let key = match &part.owner {
            Owner::Model { model, path } => model_key(model, path),
            Owner::Optimizer { optimizer, model, path, name } => {
                optimizer_key(optimizer, model, path, name)
            }
        };
        let Some(dtype) = Dtype::of(part.dtype) else {
            return Err(CheckpointError::UnsupportedDtype { tensor: key, dtype: part.dtype });
        };
        let mut tensor = TensorEntry { dtype, shape: part.shape, pieces: Vec::new() };
        if !part.range.is_empty() {
            let checksums = self.file.write(&key, dtype, part.bytes.as_slice())?;
            let (start, end) = (part.range.start, part.range.end);
            tensor.pieces.push(Piece { file: self.rank, start, end, checksums });
        }
        match part.owner {
            Owner::Model { model, path } => {
                if let Some(entry) = self.manifest.models.get_mut(&model) {
                    entry.tensors.insert(path, tensor);
                }
            }
            Owner::Optimizer { optimizer, model, path, name } => {
                self.parameter(&optimizer, &model, &path).tensors.insert(name, tensor);
            }
        }
        Ok(())
    }

    fn scalars(&mut self, optimizer: &str, model: &str, path: &str, scalars: Scalars) {
        self.parameter(optimizer, model, path).scalars = scalars;
    }
}

impl FileSink {
    fn parameter(&mut self, optimizer: &str, model: &str, path: &str) -> &mut ParameterEntry {
        let optimizer = self.manifest.optimizers.entry(optimizer.to_string()).or_default();
        let model = optimizer.models.entry(model.to_string()).or_default();
        model.entry(path.to_string()).or_default()
    }
}

/// A copy of this rank's parts, to be written while training goes on.
#[derive(Default)]
pub(crate) struct MemorySink {
    parts: Vec<Part<'static>>,
    scalars: Vec<(String, String, String, Scalars)>,
}

impl Sink for MemorySink {
    fn part(&mut self, part: Part<'_>) -> Result<(), CheckpointError> {
        let bytes = match part.bytes {
            Elements::Borrowed(bytes) => {
                Elements::Copied(Bytes::from_bytes_vec(bytes.to_vec()), 0..bytes.len())
            }
            Elements::Copied(bytes, range) => Elements::Copied(bytes, range),
        };
        let Part { owner, dtype, shape, range, .. } = part;
        self.parts.push(Part { owner, dtype, shape, range, bytes });
        Ok(())
    }

    fn scalars(&mut self, optimizer: &str, model: &str, path: &str, scalars: Scalars) {
        self.scalars.push((optimizer.into(), model.into(), path.into(), scalars));
    }
}

impl MemorySink {
    /// Hands everything on, freeing each part once it was taken.
    pub(crate) fn drain(self, sink: &mut dyn Sink) -> Result<(), CheckpointError> {
        for (optimizer, model, path, scalars) in self.scalars {
            sink.scalars(&optimizer, &model, &path, scalars);
        }
        self.parts.into_iter().try_for_each(|part| sink.part(part))
    }
}

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
            },
        );
    }
    for name in checkpoint.optimizers.keys() {
        manifest.optimizers.insert(name.clone(), Default::default());
    }
    manifest.schedulers = checkpoint.schedulers.clone();
    manifest.values = checkpoint.values.clone();
    manifest
}

/// Gives `sink` all that this rank writes: the models' parameters, then the optimizers' state.
pub(crate) fn parts(
    checkpoint: &Checkpoint<'_>,
    sink: &mut dyn Sink,
) -> Result<(), CheckpointError> {
    let mut parameters = Vec::new();
    for (name, model) in &checkpoint.models {
        let engine = &**model.engine();
        let mut outcome = Ok(());
        model.visit(&mut |held| {
            if outcome.is_err() {
                return;
            }
            let entry = model::entry(engine, held.place);
            parameters.push((held.id, name, engine, held.place));
            outcome = parameter(name, engine, held, entry, sink);
        });
        outcome?;
    }
    let ids: Vec<ParamId> = parameters.iter().map(|(id, ..)| *id).collect();
    for (name, optimizer) in &checkpoint.optimizers {
        optimizer::check_known(name, optimizer, &ids)?;
        let mut names = optimizer::Names::default();
        let mut rest = parameters.as_slice();
        while !rest.is_empty() {
            let mut bytes = 0;
            let count = rest.iter().take_while(|(_, _, engine, place)| {
                let before = bytes;
                bytes += model::entry(*engine, *place).range().len() * size_of::<f32>();
                before < BATCH
            });
            let (batch, after) = rest.split_at(count.count());
            rest = after;
            let ids: Vec<ParamId> = batch.iter().map(|(id, ..)| *id).collect();
            let mut states = optimizer::read(name, optimizer, &ids, &mut names)?;
            for (id, model, engine, place) in batch {
                if let Some(state) = states.remove(id) {
                    let entry = model::entry(*engine, *place);
                    self::state(name, model, engine.mesh(), *place, entry, state, sink)?;
                }
            }
        }
    }
    Ok(())
}

/// The part of a parameter that this rank writes.
fn parameter(
    model: &str,
    engine: &dyn Engine,
    held: model::Holding,
    entry: &Entry,
    sink: &mut dyn Sink,
) -> Result<(), CheckpointError> {
    let range = written(engine.mesh(), held.place, entry);
    let from = range.start.saturating_sub(entry.range().start);
    let mut outcome = Ok(());
    let (dtype, size) = (held.dtype, held.dtype.size());
    engine.with_bytes(held.base, &mut |bytes| {
        outcome = sink.part(Part {
            owner: Owner::Model { model: model.into(), path: entry.path.clone() },
            dtype,
            shape: entry.shape.clone(),
            range: range.clone(),
            bytes: Elements::Borrowed(&bytes[from * size..(from + range.len()) * size]),
        });
    });
    outcome
}

/// The part of a parameter's optimizer state that this rank writes.
fn state(
    optimizer: &str,
    model: &str,
    mesh: Mesh,
    place: Place,
    entry: &Entry,
    state: optimizer::State,
    sink: &mut dyn Sink,
) -> Result<(), CheckpointError> {
    sink.scalars(optimizer, model, &entry.path, state.scalars);
    for tensor in state.tensors {
        let (shape, range, from) = if tensor.shape == entry.base_shape() {
            let range = written(mesh, place, entry);
            let from = range.start.saturating_sub(entry.range().start);
            (entry.shape.clone(), range, from)
        } else if entry.held == Held::Whole {
            let range = written_whole(mesh, place, tensor.shape.iter().product());
            let from = range.start;
            (tensor.shape.clone(), range, from)
        } else {
            return Err(CheckpointError::NotElementwise {
                tensor: format!("{}: {}", entry.path, tensor.name),
                expected: entry.base_shape(),
                found: tensor.shape,
            });
        };
        let size = tensor.dtype.size();
        let bytes = from * size..(from + range.len()) * size;
        sink.part(Part {
            owner: Owner::Optimizer {
                optimizer: optimizer.into(),
                model: model.into(),
                path: entry.path.clone(),
                name: tensor.name,
            },
            dtype: tensor.dtype,
            shape,
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
