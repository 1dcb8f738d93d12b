//! One unit: its parameters, where they lie, and its states `Sharded → Unsharding → Unsharded`.
//!
//! Transitions are idempotent. Which unit goes through which, and when, is the schedule's matter.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::DType;

use crate::backend::gather_buffer::GatherBufferPlan;
use crate::collectives::Reduce;
use crate::layout::Mesh;
use crate::layout::UnitLayout;
use crate::options::Precision;

/// How a parameter is held between steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// As this rank's shard, the given elements of the flattened parameter.
    Shard(Range<usize>),
    /// Whole, on every rank: vectors, small matrices, and everything under `NO_SHARD`.
    Replicated,
    /// Whole, and each rank's own: an ignored parameter or a running statistic, which is of no unit.
    PerRank,
    /// Not at all: the entry it is tied to holds it.
    TiedTo(usize),
}

/// One parameter of a unit.
#[derive(Clone, Debug)]
pub(crate) struct ParamSpec {
    /// Its module path.
    pub(crate) path: String,
    /// Its full shape.
    pub(crate) shape: Vec<usize>,
    /// The type it is computed with, and gathered in.
    pub(crate) dtype: DType,
    /// The type that its gradient travels in when it is reduced.
    pub(crate) reduce_dtype: DType,
    /// How it is held.
    pub(crate) held: Placement,
    /// Its matrix's number in the unit's layout; also under `NO_SHARD`, where it says in which order
    /// the gradient norm is summed.
    pub(crate) segment: Option<usize>,
}

impl ParamSpec {
    /// Elements of the full parameter.
    pub(crate) fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Elements this rank holds, in elements of the flattened parameter.
    pub(crate) fn range(&self) -> Range<usize> {
        match &self.held {
            Placement::Shard(range) => range.clone(),
            Placement::Replicated | Placement::PerRank => 0..self.numel(),
            Placement::TiedTo(_) => 0..0,
        }
    }

    /// The shape of the base: a shard keeps the rank of its parameter, and an empty one is one
    /// element that never gets a gradient.
    pub(crate) fn base_shape(&self) -> Vec<usize> {
        if matches!(self.held, Placement::Replicated | Placement::PerRank) {
            return self.shape.clone();
        }
        let mut shape = vec![1; self.shape.len()];
        shape[0] = self.range().len().max(1);
        shape
    }

    /// What this rank keeps of the reduced gradient, which travels as `dtype`.
    pub(crate) fn reduce(&self, dtype: DType) -> Reduce {
        let segment = self.segment.filter(|_| matches!(self.held, Placement::Shard(_)));
        Reduce { range: self.range(), shape: self.base_shape(), segment, dtype }
    }
}

/// A unit as construction left it.
#[derive(Clone, Debug)]
pub(crate) struct Unit {
    /// Its module path, quoted for messages; `(root)` for the outermost.
    pub(crate) name: Arc<str>,
    /// Its module path; empty for the outermost.
    pub(crate) path: String,
    /// Its type's name.
    pub(crate) ty: &'static str,
    /// How many units enclose it.
    pub(crate) level: usize,
    /// Whether a field makes it a unit, not its type.
    pub(crate) field: bool,
    /// Its parameters, in layout order.
    pub(crate) entries: Vec<ParamSpec>,
    /// Where its matrices lie.
    pub(crate) layout: UnitLayout,
    /// Whether it holds shards, and so needs buffers to gather them in.
    pub(crate) gathers: bool,
    /// What types its inputs and outputs take.
    pub(crate) precision: Precision,
    /// Whether its forward is run again in backward, from its inputs alone.
    pub(crate) checkpointed: bool,
    /// The checkpointed unit that it lies in: it is run again as part of that one.
    pub(crate) within: Option<usize>,
}

impl Unit {
    /// The flat range that a full parameter is gathered in, and where it begins there.
    pub(crate) fn gathered_at(&self, entry: usize) -> (usize, usize) {
        let segment = self.entries[entry].segment.expect("a sharded entry has a segment");
        (self.layout.range_of(segment), self.layout.segment(segment).start)
    }

    /// The buffers that it is gathered in, one for each flat range: elements and their type.
    pub(crate) fn buffers(&self) -> Vec<(usize, DType)> {
        let ranges = if self.gathers { self.layout.ranges() } else { &[] };
        ranges.iter().map(|range| (range.layout.padded_len(), range.dtype)).collect()
    }

    /// Bytes of the unsharded unit, padding included.
    pub(crate) fn unsharded_bytes(&self) -> usize {
        self.buffers().iter().map(|(numel, dtype)| numel * dtype.size()).sum()
    }

    /// What a rank keeps of each gathered flat range after forward, as one of `size` neighbours:
    /// nothing of the outermost unit, which stays gathered.
    pub(crate) fn parts(&self, size: usize) -> Vec<(usize, DType)> {
        let buffers = if self.level > 0 { self.buffers() } else { Vec::new() };
        buffers.into_iter().map(|(numel, dtype)| (numel / size, dtype)).collect()
    }

    /// Elements of its full parameters; tied ones belong to the place that owns them.
    pub(crate) fn num_params(&self) -> usize {
        self.owned().map(ParamSpec::numel).sum()
    }

    /// Its entries but for those that another one holds.
    fn owned(&self) -> impl Iterator<Item = &ParamSpec> {
        self.entries.iter().filter(|entry| !matches!(entry.held, Placement::TiedTo(_)))
    }

    /// Bytes of its full gradients as they arrive, and as they are reduced or held until then.
    pub(crate) fn gradient_bytes(&self) -> (usize, usize) {
        let bytes = |of: fn(&ParamSpec) -> DType| {
            self.owned().map(|entry| entry.numel() * of(entry).size()).sum()
        };
        (bytes(|entry| entry.dtype), bytes(|entry| entry.reduce_dtype))
    }

    /// Bytes of this rank's shards in the types in which they are sent.
    pub(crate) fn sent_bytes(&self) -> usize {
        let sharded = |entry: &&ParamSpec| matches!(entry.held, Placement::Shard(_));
        let sent = self.entries.iter().filter(sharded);
        sent.map(|entry| entry.range().len() * entry.dtype.size()).sum()
    }

    /// Bytes of the shards that are cast or copied to be sent, in the all-gather of this unit that
    /// has the most; `offloaded` says that they rest on the host.
    pub(crate) fn sending_bytes(&self, offloaded: bool) -> usize {
        let mut bytes = vec![0; self.layout.ranges().len()];
        for (at, entry) in self.entries.iter().enumerate() {
            let made = offloaded || entry.dtype != DType::F32;
            if made && matches!(entry.held, Placement::Shard(_)) {
                bytes[self.gathered_at(at).0] += entry.range().len() * entry.dtype.size();
            }
        }
        bytes.into_iter().max().unwrap_or(0)
    }

    /// Bytes of what every rank holds whole, in the types in which it is computed with.
    pub(crate) fn whole_bytes(&self) -> usize {
        let whole = self.entries.iter().filter(|entry| entry.held == Placement::Replicated);
        whole.map(|entry| entry.numel() * entry.dtype.size()).sum()
    }

    /// Bytes that this rank holds of it between steps: shards, and what is replicated.
    pub(crate) fn held_bytes(&self) -> (usize, usize) {
        let bytes = |entry: &ParamSpec| entry.range().len() * size_of::<f32>();
        let (mut shards, mut replicated) = (0, 0);
        for entry in &self.entries {
            match entry.held {
                Placement::Shard(_) => shards += bytes(entry),
                _ => replicated += bytes(entry),
            }
        }
        (shards, replicated)
    }

    /// The entry that holds an entry's values: itself, unless tied.
    pub(crate) fn holder(&self, entry: usize) -> usize {
        match self.entries[entry].held {
            Placement::TiedTo(first) => first,
            _ => entry,
        }
    }

    /// The parts of an entry's gradient whose squares `mesh.rank` sums up for the norm, and the
    /// shard's rank each belongs to: one's own shard, or, of a whole matrix, every rank's.
    pub(crate) fn norm_ranges(&self, entry: usize, mesh: Mesh) -> Vec<(usize, Range<usize>)> {
        let entry = &self.entries[entry];
        match (&entry.held, entry.segment) {
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

/// The buffers of a model, `ring` to a nesting level.
pub(crate) fn gather_buffer_plan(units: &[Unit], ring: usize) -> GatherBufferPlan {
    let buffers: Vec<_> = units.iter().map(|unit| (unit.level, unit.buffers())).collect();
    GatherBufferPlan::new(&buffers, ring)
}
