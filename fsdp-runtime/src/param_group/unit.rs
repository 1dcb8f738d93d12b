//! A unit of a sharded model: its parameters, their placement, and the memory that they take.
//!
//! A [`Unit`] does not change after construction. The state of a unit in training belongs to the
//! schedule.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::DType;

use super::control::UnitControl;
use crate::collectives::Reduce;
use crate::layout::{FlatRange, Mesh, StorageType, TensorSplit, UnitLayout};
use crate::options::Precision;

/// The part of a parameter that a rank stores between steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// This rank's shard: the given elements of the flattened parameter.
    Shard(Range<usize>),
    /// The whole parameter, equal on every rank: vectors, small matrices, and all parameters under
    /// `NO_SHARD`.
    Replicated,
    /// The whole parameter, with different values on each rank: an ignored parameter or a running
    /// statistic. It belongs to no unit.
    PerRank,
    /// Nothing: the parameter is an alias of the unit's parameter with this number, which stores
    /// the weight.
    TiedTo(usize),
}

/// A parameter of a unit: its name, shape, dtypes and placement.
#[derive(Clone, Debug)]
pub(crate) struct ParamSpec {
    /// Module path of the parameter.
    pub(crate) path: String,
    /// Full shape of the parameter; of a split one, that of this rank's part.
    pub(crate) shape: Vec<usize>,
    /// The part of the parameter that this rank has among its tensor parallel ranks; `None` for a whole one.
    pub(crate) split: Option<TensorSplit>,
    /// Whether tensor parallel ranks use the whole parameter with parts of other values, so that its gradient is
    /// the sum of theirs.
    pub(crate) is_shared: bool,
    /// Dtype in which the parameter is gathered and computed with.
    pub(crate) dtype: DType,
    /// Dtype in which the gradient is sent when it is reduced.
    pub(crate) reduce_dtype: DType,
    /// The part of the parameter that this rank stores.
    pub(crate) placement: Placement,
    /// Form in which the parameter is stored and sent.
    pub(crate) storage: StorageType,
    /// Whether the parameter required a gradient when the model was sharded or planned. One that is
    /// stored in f32 may be frozen or unfrozen later.
    pub(crate) is_trained: bool,
    /// Codes that shards are sent in, if they are not sent as they are stored.
    pub(crate) codes: Option<StorageType>,
    /// Codes that the parts of the gradient of a sharded parameter are sent in, if there are any.
    pub(crate) gradient_codes: Option<StorageType>,
    /// Number of the matrix in the unit's layout; `None` for a parameter outside the layout.
    ///
    /// Under `NO_SHARD` nothing is sharded, but matrices have numbers all the same: they fix the
    /// order in which the gradient norm is summed.
    pub(crate) segment: Option<usize>,
}

impl ParamSpec {
    /// Returns the shape of the parameter in the module, of which this rank may have a part.
    pub(crate) fn whole_shape(&self) -> Vec<usize> {
        match self.split {
            Some(split) => split.whole_shape(&self.shape),
            None => self.shape.clone(),
        }
    }

    /// Returns the number of elements of the parameter in the module.
    pub(crate) fn whole_numel(&self) -> usize {
        self.split.map_or(1, |split| split.parts) * self.numel()
    }

    /// Returns the number of elements of the full parameter.
    pub(crate) fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns whether each rank stores a shard of the parameter.
    pub(crate) fn is_sharded(&self) -> bool {
        matches!(self.placement, Placement::Shard(_))
    }

    /// Returns the elements of the flattened parameter that this rank stores.
    pub(crate) fn range(&self) -> Range<usize> {
        match &self.placement {
            Placement::Shard(range) => range.clone(),
            Placement::Replicated | Placement::PerRank => 0..self.numel(),
            Placement::TiedTo(_) => 0..0,
        }
    }

    /// Returns the part of the stored parameter that this rank stores: the elements of
    /// [`range`](Self::range), or the words of their codes, counted from the parameter's first word.
    pub(crate) fn stored_range(&self) -> Range<usize> {
        self.storage.stored_range(&self.range())
    }

    /// Returns the shape of the tensor that this rank stores.
    ///
    /// A shard, and codes, have as many dimensions as their parameter: `[n, 1, ..]`. An empty shard
    /// is stored as one element, which never receives a gradient.
    pub(crate) fn base_shape(&self) -> Vec<usize> {
        let is_whole = matches!(self.placement, Placement::Replicated | Placement::PerRank);
        if is_whole && !self.storage.is_coded() {
            return self.shape.clone();
        }
        let mut shape = vec![1; self.shape.len()];
        shape[0] = self.stored_range().len().max(1);
        shape
    }

    /// Returns whether the parameter can be trained. A frozen one that is not stored in f32 cannot.
    pub(crate) fn is_trainable(&self) -> bool {
        self.storage == StorageType::F32 || self.is_trained
    }

    /// Returns whether an optimizer steps a copy of the parameter in f32, which is then rounded.
    pub(crate) fn is_rounded(&self) -> bool {
        self.is_trained && self.storage == StorageType::Bf16
    }

    /// Returns the form in which the parameter is sent in the all-gather of its unit.
    pub(crate) fn sent(&self) -> StorageType {
        self.codes.unwrap_or(self.storage)
    }

    /// Returns the dtype in which the parameter is sent in the all-gather of its unit.
    fn sent_dtype(&self) -> DType {
        self.sent().sent_dtype(self.dtype)
    }

    /// Returns the bytes of this rank's shard as it is sent.
    fn sent_bytes(&self) -> usize {
        self.sent().stored_len(self.range().len()) * self.sent_dtype().size()
    }

    /// Returns the bytes of the whole gradient as it is sent when it is reduced.
    pub(crate) fn sent_gradient_bytes(&self) -> usize {
        match self.gradient_codes {
            Some(codes) => codes.stored_bytes(self.numel()),
            None => self.numel() * self.reduce_dtype.size(),
        }
    }

    /// Returns the part of the reduced gradient that this rank keeps. The gradient is sent as
    /// `dtype`.
    pub(crate) fn reduce(&self, dtype: DType) -> Reduce {
        let segment = self.segment.filter(|_| matches!(self.placement, Placement::Shard(_)));
        let range = if self.is_trainable() { self.range() } else { 0..0 };
        Reduce { range, shape: self.base_shape(), segment, dtype }
    }
}

/// A unit of a sharded model, as construction laid it out.
#[derive(Clone, Debug)]
pub(crate) struct Unit {
    /// Module path in backticks, for messages; `(root)` for the outermost unit.
    pub(crate) name: Arc<str>,
    /// Module path; empty for the outermost unit.
    pub(crate) path: String,
    /// Name of the unit's type.
    pub(crate) ty: &'static str,
    /// Number of units that enclose this one.
    pub(crate) level: usize,
    /// Whether a field under `#[fsdp(unit)]`, and not the type, makes the module a unit.
    pub(crate) field: bool,
    /// Parameters of the unit, in layout order.
    pub(crate) params: Vec<ParamSpec>,
    /// Positions of the unit's matrices in flat ranges.
    pub(crate) layout: UnitLayout,
    /// Whether the unit's sharded parameters are gathered, and so need gather buffers. A shard group
    /// of one rank computes with the shards themselves where it can.
    pub(crate) gathers: bool,
    /// Dtypes to which the unit's inputs and outputs are cast.
    pub(crate) precision: Precision,
    /// Whether the unit's forward is recomputed in backward, from its inputs.
    pub(crate) recomputed: bool,
    /// Number of the enclosing unit whose recomputation includes this unit.
    pub(crate) within: Option<usize>,
    /// Whether no trained parameter is declared before the unit. The unit's inputs are then taken to
    /// be those of the model, which need no gradient.
    pub(crate) takes_model_input: bool,
    /// The modules of a unit of several fields.
    pub(crate) group: Option<UnitGroup>,
    /// When the unit is gathered and resharded, as the options say.
    pub(crate) control: UnitControl,
}

/// The modules of a unit of several fields, under `#[fsdp(unit = "name")]`.
#[derive(Clone, Debug)]
pub(crate) struct UnitGroup {
    /// Number of the enclosing unit. The group is resharded at the end of its forward at the latest.
    pub(crate) enclosing: usize,
    /// Number of modules.
    pub(crate) modules: usize,
    /// Number of the module of each parameter.
    pub(crate) module_of: Vec<usize>,
    /// Number of the first unit after the last of the modules, in layout order.
    pub(crate) until: usize,
}

impl Unit {
    /// Returns the number of the flat range that a sharded parameter is gathered in, and the
    /// element at which the parameter begins there.
    pub(crate) fn gathered_at(&self, entry: usize) -> (usize, usize) {
        let segment = self.params[entry].segment.expect("a sharded parameter is in the layout");
        (self.layout.range_of(segment), self.layout.segment(segment).start)
    }

    /// Returns the length and dtype of each gather buffer that the unit needs, one for each flat
    /// range.
    pub(crate) fn buffers(&self) -> Vec<(usize, DType)> {
        let size = |range: &FlatRange| (range.layout.padded_len(), range.dtype);
        self.gathered_ranges().iter().map(size).collect()
    }

    /// Returns the flat ranges of the unit that are gathered.
    fn gathered_ranges(&self) -> &[FlatRange] {
        if self.gathers { self.layout.ranges() } else { &[] }
    }

    /// Returns, for each flat range that is gathered, the length and dtype in which it is sent if
    /// these differ from those of the gather buffer.
    pub(crate) fn code_buffers(&self) -> Vec<Option<(usize, DType)>> {
        let sent = |FlatRange { dtype, sent, layout, .. }: &FlatRange| {
            let sent = (sent.stored_len(layout.padded_len()), sent.sent_dtype(*dtype));
            (sent != (layout.padded_len(), *dtype)).then_some(sent)
        };
        self.gathered_ranges().iter().map(sent).collect()
    }

    /// Returns whether the unit's matrices are stored as they are gathered, so that nothing is cast
    /// or decoded.
    pub(crate) fn is_stored_as_gathered(&self) -> bool {
        let mut sharded = self.params.iter().filter(|entry| entry.is_sharded());
        let is_same = |entry: &ParamSpec| {
            let is_plain = !entry.storage.is_coded() && entry.sent() == entry.storage;
            is_plain && entry.storage.dtype() == entry.dtype
        };
        self.gathers && sharded.all(is_same)
    }

    /// Returns the bytes of the unit's gather buffers, padding included.
    pub(crate) fn unsharded_bytes(&self) -> usize {
        self.buffers().iter().map(|(numel, dtype)| numel * dtype.size()).sum()
    }

    /// Returns the length and dtype of the part of each gathered flat range that a rank keeps after
    /// forward, where `size` ranks share the range. Codes are kept as they were sent.
    ///
    /// The list is empty for the outermost unit, which stays gathered.
    pub(crate) fn parts(&self, size: usize) -> Vec<(usize, DType)> {
        let buffers = if self.level > 0 { self.buffers() } else { Vec::new() };
        let kept = buffers.into_iter().zip(self.code_buffers());
        let kept = kept.map(|(gathered, sent)| sent.unwrap_or(gathered));
        kept.map(|(numel, dtype)| (numel / size, dtype)).collect()
    }

    /// Returns the number of elements of the unit's full parameters. A tied weight counts once.
    pub(crate) fn num_params(&self) -> usize {
        self.owned().map(ParamSpec::numel).sum()
    }

    /// Returns the unit's parameters without the aliases of tied weights.
    fn owned(&self) -> impl Iterator<Item = &ParamSpec> {
        self.params.iter().filter(|entry| !matches!(entry.placement, Placement::TiedTo(_)))
    }

    /// Returns the unit's parameters that required a gradient when the model was sharded or planned,
    /// without the aliases of tied weights.
    pub(crate) fn trained(&self) -> impl Iterator<Item = &ParamSpec> {
        self.owned().filter(|entry| entry.is_trained)
    }

    /// Returns the bytes of the unit's full gradients, in the dtypes of the autodiff graph and in
    /// the dtypes of the reduction. Full gradients that wait for a reduction have the latter.
    pub(crate) fn gradient_bytes(&self) -> (usize, usize) {
        let bytes = |of: fn(&ParamSpec) -> DType| {
            self.trained().map(|entry| entry.numel() * of(entry).size()).sum()
        };
        (bytes(|entry| entry.dtype), bytes(|entry| entry.reduce_dtype))
    }

    /// Returns the bytes of the codes of the unit's gradients while they are reduced: what a rank sends,
    /// and what it receives.
    pub(crate) fn gradient_code_bytes(&self) -> usize {
        let coded = self.trained().filter(|entry| entry.gradient_codes.is_some());
        coded.map(|entry| 2 * entry.sent_gradient_bytes()).sum()
    }

    /// Returns the bytes of the largest copy in f32 that an optimizer steps in place of a parameter.
    pub(crate) fn step_copy_bytes(&self) -> usize {
        let rounded = self.owned().filter(|entry| entry.is_rounded());
        rounded.map(|entry| entry.range().len() * size_of::<f32>()).max().unwrap_or(0)
    }

    /// Returns the bytes of the gradients of this rank's shards and replicated parameters, in f32.
    pub(crate) fn reduced_bytes(&self) -> usize {
        self.trained().map(|entry| entry.range().len() * size_of::<f32>()).sum()
    }

    /// Returns the bytes of this rank's shards, as they are sent.
    pub(crate) fn sent_bytes(&self) -> usize {
        let sharded = |entry: &&ParamSpec| matches!(entry.placement, Placement::Shard(_));
        self.params.iter().filter(sharded).map(ParamSpec::sent_bytes).sum()
    }

    /// Returns the most bytes of shards that one all-gather of this unit casts, or copies to the
    /// device, before sending.
    ///
    /// `offloaded` says that the shards are stored on the host.
    pub(crate) fn sending_bytes(&self, offloaded: bool) -> usize {
        let mut bytes = vec![0; self.layout.ranges().len()];
        for (at, entry) in self.params.iter().enumerate() {
            let is_cast = entry.sent_dtype() != entry.storage.dtype();
            let made = offloaded || is_cast || entry.codes.is_some();
            if made && matches!(entry.placement, Placement::Shard(_)) {
                bytes[self.gathered_at(at).0] += entry.sent_bytes();
            }
        }
        bytes.into_iter().max().unwrap_or(0)
    }

    /// Returns the bytes of the replicated parameters, in the dtypes in which they are computed
    /// with.
    pub(crate) fn replicated_bytes(&self) -> usize {
        let whole = self.params.iter().filter(|entry| entry.placement == Placement::Replicated);
        whole.map(|entry| entry.numel() * entry.dtype.size()).sum()
    }

    /// Returns the bytes of the shards and of the replicated parameters that this rank stores.
    pub(crate) fn stored_bytes(&self) -> (usize, usize) {
        let bytes = |entry: &ParamSpec| entry.storage.stored_bytes(entry.range().len());
        let (mut shards, mut replicated) = (0, 0);
        for entry in &self.params {
            match entry.placement {
                Placement::Shard(_) => shards += bytes(entry),
                _ => replicated += bytes(entry),
            }
        }
        (shards, replicated)
    }

    /// Returns the number of the parameter that stores the values of parameter `entry`: the owner
    /// of the tie for an alias, or else `entry`.
    pub(crate) fn holder(&self, entry: usize) -> usize {
        match self.params[entry].placement {
            Placement::TiedTo(first) => first,
            _ => entry,
        }
    }

    /// Returns the parts of a gradient whose squares `mesh.rank` sums for the gradient norm, each
    /// with the rank of the shard group that it belongs to.
    ///
    /// Of a sharded matrix, this is the rank's own shard. A replicated matrix is split in the same
    /// parts, so that the norm has the same bits under `NO_SHARD`. Other parameters have no parts.
    pub(crate) fn norm_ranges(&self, entry: usize, mesh: Mesh) -> Vec<(usize, Range<usize>)> {
        let entry = &self.params[entry];
        match (&entry.placement, entry.segment) {
            (Placement::Shard(range), _) => vec![(mesh.shard_rank().index(), 0..range.len())],
            (Placement::Replicated, Some(segment)) => mesh
                .shard_size()
                .ranks()
                .map(|rank| (rank.index(), self.layout.shard_of(segment, rank)))
                .collect(),
            _ => Vec::new(),
        }
    }
}

/// Returns the length and dtype of the buffers that units receive codes in, one for each dtype. Units
/// use them in turn.
pub(crate) fn code_buffers(units: &[Unit]) -> Vec<(usize, DType)> {
    let mut buffers: Vec<(usize, DType)> = Vec::new();
    for (numel, dtype) in units.iter().flat_map(Unit::code_buffers).flatten() {
        match buffers.iter_mut().find(|(_, other)| *other == dtype) {
            Some((most, _)) => *most = numel.max(*most),
            None => buffers.push((numel, dtype)),
        }
    }
    buffers
}
