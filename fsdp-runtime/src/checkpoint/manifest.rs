//! `manifest.json`: what a checkpoint holds and where each element lies.
//!
//! Nothing in it is trusted. It ends with a checksum of itself, so that a changed digit is found;
//! its numbers are checked for overflow, and the pieces of every tensor must tile it exactly.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

use super::scalar::Scalars;
use super::seal::{seal, unseal};
use crate::error::CheckpointError;
use crate::layout::WorldSize;

/// The manifest's name in its folder.
pub const MANIFEST: &str = "manifest.json";
/// What every manifest calls itself.
const FORMAT: &str = "fsdp-burn checkpoint";
/// The version this crate writes, and the latest it reads.
pub const VERSION: u64 = 2;
/// Bytes of a piece that one checksum covers: a reader checks the blocks it touches.
pub const BLOCK: usize = 1 << 20;

/// All of a checkpoint but the elements themselves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: String,
    version: u64,
    /// Ranks that wrote it, a file each.
    pub world_size: usize,
    /// Bytes of each rank's file, in rank order.
    pub files: Vec<u64>,
    /// Bytes that one CRC-32C covers.
    pub checksum_block: u64,
    /// Where the training stood.
    pub progress: Progress,
    /// The models, by name.
    pub models: BTreeMap<String, ModelEntry>,
    /// The optimizers, by name.
    pub optimizers: BTreeMap<String, OptimizerEntry>,
    /// The learning-rate schedulers' state, by name.
    pub schedulers: BTreeMap<String, Scalars>,
    /// The loss scalers' state, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub scalers: BTreeMap<String, Scalars>,
    /// What the user added, as JSON.
    pub values: BTreeMap<String, String>,
}

/// How the ranks that wrote a checkpoint were arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeshShape {
    /// Groups that each hold the whole model.
    pub replicate: usize,
    /// Ranks that share one model.
    pub shard: usize,
}

/// Where a training run stood.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Progress {
    /// Optimizer steps taken.
    pub step: u64,
    /// Passes over the data completed.
    pub epoch: u64,
    /// The data sampler's position within the epoch, in units of the user's own.
    pub position: u64,
    /// The scale of the loss, where it is scaled.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "scale")]
    pub loss_scale: Option<f32>,
}

/// An f32 as text: JSON has no infinity, and its reader may miss the last bit.
mod scale {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(scale: &Option<f32>, to: S) -> Result<S::Ok, S::Error> {
        match scale {
            Some(scale) => to.serialize_str(&scale.to_string()),
            None => to.serialize_none(),
        }
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Option<f32>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| text.parse().map_err(D::Error::custom)).transpose()
    }
}

/// One model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelEntry {
    /// The strategy it was sharded with.
    pub strategy: String,
    /// How the ranks were arranged for it.
    pub mesh: MeshShape,
    /// Its units, in layout order.
    pub units: Vec<UnitEntry>,
    /// Its parameters, by module path; tied ones once, at the place that owns them.
    pub tensors: BTreeMap<String, TensorEntry>,
    /// Its randomness, by rank.
    pub random: BTreeMap<usize, RandomState>,
    /// The names that tensors have in the framework they come from, where they have others.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub keys: BTreeMap<String, KeyEntry>,
}

/// A tensor's name and layout in the framework it comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyEntry {
    /// Its name there.
    pub name: String,
    /// Whether it lies transposed there.
    pub transposed: bool,
}

/// One unit of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnitEntry {
    /// Its module path; empty for the outermost.
    pub path: String,
    /// How many units enclose it.
    pub level: usize,
    /// Its parameters' paths, in layout order.
    pub parameters: Vec<String>,
}

/// A rank's place in the stream that dropout draws from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RandomState {
    /// The stream's seed.
    pub seed: u64,
    /// Backward passes until the save.
    pub step: u64,
}

/// One optimizer: its state by model name and parameter path.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerEntry {
    /// State of each parameter that has any.
    pub models: BTreeMap<String, BTreeMap<String, ParameterEntry>>,
}

/// An optimizer's state of one parameter.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParameterEntry {
    /// Numbers, such as the count of steps, by name.
    pub scalars: Scalars,
    /// Tensors, such as moments, by name.
    pub tensors: BTreeMap<String, TensorEntry>,
}

/// One tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Its dtype, in safetensors' names.
    pub dtype: Dtype,
    /// Its full shape.
    pub shape: Vec<usize>,
    /// How many copies there are, one after the other: 1, or each rank's own of an ignored
    /// parameter that differs between them.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub copies: usize,
    /// Where its elements lie, in order.
    pub pieces: Vec<Piece>,
}

fn one() -> usize {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_one(copies: &usize) -> bool {
    *copies == 1
}

/// A range of a flattened tensor's elements, in one rank's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Piece {
    /// The rank whose file holds it.
    pub file: usize,
    /// Its first element.
    pub start: usize,
    /// One beyond its last.
    pub end: usize,
    /// The CRC-32C of each [`BLOCK`] of its bytes.
    pub checksums: Vec<u32>,
}

impl Piece {
    /// The elements it holds.
    pub fn range(&self) -> Range<usize> {
        self.start..self.end
    }
}

/// The dtypes a checkpoint can hold, in safetensors' names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Dtype {
    F64,
    F32,
    F16,
    BF16,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
}

impl Dtype {
    const ALL: [(Self, DType); 12] = [
        (Self::F64, DType::F64),
        (Self::F32, DType::F32),
        (Self::F16, DType::F16),
        (Self::BF16, DType::BF16),
        (Self::I64, DType::I64),
        (Self::I32, DType::I32),
        (Self::I16, DType::I16),
        (Self::I8, DType::I8),
        (Self::U64, DType::U64),
        (Self::U32, DType::U32),
        (Self::U16, DType::U16),
        (Self::U8, DType::U8),
    ];

    /// The name of a Burn dtype; `None` for quantised ones and Booleans.
    pub fn of(dtype: DType) -> Option<Self> {
        Self::ALL.into_iter().find(|(_, burn)| *burn == dtype).map(|(this, _)| this)
    }

    /// Burn's name.
    pub fn burn(self) -> DType {
        Self::ALL[self as usize].1
    }

    /// Bytes of an element.
    pub fn size(self) -> usize {
        self.burn().size()
    }
}

impl TensorEntry {
    /// Elements of the full tensor; `None` where the shape overflows.
    pub fn numel(&self) -> Option<usize> {
        self.shape.iter().try_fold(1usize, |numel, &dim| numel.checked_mul(dim))
    }

    /// What is wrong with it.
    fn problem(&self, files: &[u64], block: u64) -> Option<String> {
        let numel = self.numel().and_then(|numel| numel.checked_mul(self.copies));
        let bytes = numel.and_then(|numel| numel.checked_mul(self.dtype.size()));
        let (Some(numel), Some(_)) = (numel, bytes) else {
            return Some(format!("the shape {:?} overflows", self.shape));
        };
        if self.copies != 1 && self.copies != files.len() {
            return Some(format!("{} copies of {} ranks", self.copies, files.len()));
        }
        let mut covered = 0;
        let mut seen = BTreeSet::new();
        for piece in &self.pieces {
            if piece.start != covered || piece.end <= piece.start || piece.end > numel {
                return Some(format!(
                    "the piece {}..{} comes after element {covered} of {numel}; pieces must tile",
                    piece.start, piece.end
                ));
            }
            let Some(&file) = files.get(piece.file) else {
                return Some(format!("a piece lies in file {} of {}", piece.file, files.len()));
            };
            if !seen.insert(piece.file) {
                return Some(format!("two pieces lie in file {}", piece.file));
            }
            // No overflow: the tensor's own bytes do not.
            let bytes = ((piece.end - piece.start) * self.dtype.size()) as u64;
            if bytes > file {
                return Some(format!("a piece of {bytes} bytes lies in a file of {file}"));
            }
            if piece.checksums.len() as u64 != bytes.div_ceil(block) {
                return Some(format!(
                    "{} checksums for a piece of {bytes} bytes",
                    piece.checksums.len()
                ));
            }
            covered = piece.end;
        }
        (covered != numel).then(|| format!("pieces hold {covered} of {numel} elements"))
    }
}

impl Manifest {
    /// An empty one, of a world.
    pub(crate) fn new(world: WorldSize, progress: Progress) -> Self {
        Self {
            format: FORMAT.into(),
            version: VERSION,
            world_size: world.size(),
            files: vec![0; world.size()],
            checksum_block: BLOCK as u64,
            progress,
            models: BTreeMap::new(),
            optimizers: BTreeMap::new(),
            schedulers: BTreeMap::new(),
            scalers: BTreeMap::new(),
            values: BTreeMap::new(),
        }
    }

    /// Reads a manifest and checks all that can be checked without the other files. `file` is its
    /// name in errors.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NotAManifest`], [`LaterVersion`](CheckpointError::LaterVersion),
    /// [`Damaged`](CheckpointError::Damaged) where the checksum is not the text's, or
    /// [`Inconsistent`](CheckpointError::Inconsistent) with every contradiction.
    pub fn parse(text: &[u8], file: &str) -> Result<Self, CheckpointError> {
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u64,
        }
        let not = |reason: String| CheckpointError::NotAManifest { file: file.into(), reason };
        let head: Head = serde_json::from_slice(text).map_err(|error| not(error.to_string()))?;
        if head.format != FORMAT {
            return Err(not(format!("its format is `{}`, not `{FORMAT}`", head.format)));
        }
        if head.version > VERSION {
            let (found, supported) = (head.version, VERSION);
            return Err(CheckpointError::LaterVersion { file: file.into(), found, supported });
        }
        let body = unseal(text)
            .map_err(|reason| CheckpointError::Damaged { file: file.into(), reason })?;
        Self::parse_body(&body, file)
    }

    /// [`parse`](Self::parse) without the checksum: what a fuzzer reaches past it with.
    #[doc(hidden)]
    pub fn parse_body(body: &[u8], file: &str) -> Result<Self, CheckpointError> {
        let manifest: Self = serde_json::from_slice(body).map_err(|error| {
            CheckpointError::NotAManifest { file: file.into(), reason: error.to_string() }
        })?;
        let problems = manifest.problems();
        if problems.is_empty() {
            return Ok(manifest);
        }
        Err(CheckpointError::Inconsistent { file: file.into(), problems })
    }

    /// The text of `manifest.json`.
    pub fn to_text(&self) -> String {
        seal(&self.to_body())
    }

    /// The text without its checksum.
    #[doc(hidden)]
    pub fn to_body(&self) -> String {
        serde_json::to_string(self).expect("strings, numbers and maps of strings serialise")
    }

    /// Every tensor, with the name its pieces have in the ranks' files.
    pub fn tensors(&self) -> impl Iterator<Item = (String, &TensorEntry)> {
        let models = self.models.iter().flat_map(|(model, entry)| {
            entry.tensors.iter().map(move |(path, tensor)| (model_key(model, path), tensor))
        });
        let optimizers = self.optimizers.iter().flat_map(|(optimizer, entry)| {
            entry.models.iter().flat_map(move |(model, parameters)| {
                parameters.iter().flat_map(move |(path, parameter)| {
                    parameter.tensors.iter().map(move |(name, tensor)| {
                        (optimizer_key(optimizer, model, path, name), tensor)
                    })
                })
            })
        });
        models.chain(optimizers)
    }

    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if self.format != FORMAT || self.version == 0 || self.version > VERSION {
            problems.push(format!("format `{}`, version {}", self.format, self.version));
        }
        if self.world_size == 0 || self.files.len() != self.world_size {
            problems.push(format!("{} files for {} ranks", self.files.len(), self.world_size));
        }
        for (name, model) in &self.models {
            let mesh = model.mesh;
            if mesh.replicate.checked_mul(mesh.shard) != Some(self.world_size) {
                problems
                    .push(format!("`{name}`: a mesh of {mesh:?} for {} ranks", self.world_size));
            }
        }
        if self.checksum_block == 0 || self.checksum_block > 1 << 40 {
            problems.push(format!("checksums of {} bytes each", self.checksum_block));
            return problems;
        }
        for (name, tensor) in self.tensors() {
            if let Some(problem) = tensor.problem(&self.files, self.checksum_block) {
                problems.push(format!("`{name}`: {problem}"));
            }
        }
        for (optimizer, entry) in &self.optimizers {
            for (model, parameters) in &entry.models {
                let tensors = self.models.get(model).map(|model| &model.tensors);
                for path in parameters.keys() {
                    if !tensors.is_some_and(|tensors| tensors.contains_key(path)) {
                        problems.push(format!(
                            "`{optimizer}` has state of `{model}`'s unknown `{path}`"
                        ));
                    }
                }
            }
        }
        problems
    }

    /// Adds another rank's part: its pieces, its file and its randomness.
    pub(crate) fn merge(&mut self, part: Self, rank: usize) {
        if let (Some(bytes), Some(&theirs)) = (self.files.get_mut(rank), part.files.get(rank)) {
            *bytes = theirs;
        }
        for (name, model) in part.models {
            match self.models.get_mut(&name) {
                None => {
                    self.models.insert(name, model);
                }
                Some(own) => {
                    merge_tensors(&mut own.tensors, model.tensors);
                    own.random.extend(model.random);
                }
            }
        }
        for (name, optimizer) in part.optimizers {
            let own = self.optimizers.entry(name).or_default();
            for (model, parameters) in optimizer.models {
                let own = own.models.entry(model).or_default();
                for (path, parameter) in parameters {
                    let own = own.entry(path).or_default();
                    own.scalars.extend(parameter.scalars);
                    merge_tensors(&mut own.tensors, parameter.tensors);
                }
            }
        }
    }

    /// Checks a manifest before it is written.
    pub(crate) fn check(&self, file: &str) -> Result<(), CheckpointError> {
        let problems = self.problems();
        if problems.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::Inconsistent { file: file.into(), problems })
    }
}

fn merge_tensors(own: &mut BTreeMap<String, TensorEntry>, other: BTreeMap<String, TensorEntry>) {
    for (name, tensor) in other {
        match own.get_mut(&name) {
            None => {
                own.insert(name, tensor);
            }
            Some(own) => {
                own.pieces.extend(tensor.pieces);
                own.pieces.sort_by_key(|piece| piece.start);
            }
        }
    }
}

/// The name of a parameter's piece in a rank's file.
pub(crate) fn model_key(model: &str, path: &str) -> String {
    format!("model/{model}/{path}")
}

/// The name of an optimizer tensor's piece in a rank's file.
pub(crate) fn optimizer_key(optimizer: &str, model: &str, path: &str, name: &str) -> String {
    format!("optimizer/{optimizer}/{model}/{path}/{name}")
}

/// The name of a rank's file.
pub(crate) fn rank_file(rank: usize) -> String {
    format!("rank-{rank:05}.safetensors")
}
