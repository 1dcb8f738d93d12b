//! A unit of a sharded model: its parameters, their placement, and the memory that they take.
//!
//! A [`Unit`] does not change after construction. The state of a unit in training belongs to the
//! schedule.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::DType;

use crate::backend::gather_buffer::GatherBufferPlan;
use crate::collectives::Reduce;
use crate::layout::{Mesh, UnitLayout};
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
    /// Full shape of the parameter.
    pub(crate) shape: Vec<usize>,
    /// Dtype in which the parameter is gathered and computed with.
    pub(crate) dtype: DType,
    /// Dtype in which the gradient is sent when it is reduced.
    pub(crate) reduce_dtype: DType,
    /// The part of the parameter that this rank stores.
    pub(crate) placement: Placement,
    /// Number of the matrix in the unit's layout; `None` for a parameter outside the layout.
    ///
    /// Under `NO_SHARD` nothing is sharded, but matrices have numbers all the same: they fix the
    /// order in which the gradient norm is summed.
    pub(crate) segment: Option<usize>,
}

impl ParamSpec {
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

    /// Returns the shape of the tensor that this rank stores.
    ///
    /// A shard has as many dimensions as its parameter: `[n, 1, ..]`. An empty shard is stored as
    /// one element, which never receives a gradient.
    pub(crate) fn base_shape(&self) -> Vec<usize> {
        if matches!(self.placement, Placement::Replicated | Placement::PerRank) {
            return self.shape.clone();
        }
        let mut shape = vec![1; self.shape.len()];
        shape[0] = self.range().len().max(1);
        shape
    }

    /// Returns the part of the reduced gradient that this rank keeps. The gradient is sent as
    /// `dtype`.
    pub(crate) fn reduce(&self, dtype: DType) -> Reduce {
        let segment = self.segment.filter(|_| matches!(self.placement, Placement::Shard(_)));
        Reduce { range: self.range(), shape: self.base_shape(), segment, dtype }
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
        let ranges = if self.gathers { self.layout.ranges() } else { &[] };
        ranges.iter().map(|range| (range.layout.padded_len(), range.dtype)).collect()
    }

    /// Returns the bytes of the unit's gather buffers, padding included.
    pub(crate) fn unsharded_bytes(&self) -> usize {
        self.buffers().iter().map(|(numel, dtype)| numel * dtype.size()).sum()
    }

    /// Returns the length and dtype of the part of each gathered flat range that a rank keeps after
    /// forward, where `size` ranks share the range.
    ///
    /// The list is empty for the outermost unit, which stays gathered.
    pub(crate) fn parts(&self, size: usize) -> Vec<(usize, DType)> {
        let buffers = if self.level > 0 { self.buffers() } else { Vec::new() };
        buffers.into_iter().map(|(numel, dtype)| (numel / size, dtype)).collect()
    }

    /// Returns the number of elements of the unit's full parameters. A tied weight counts once.
    pub(crate) fn num_params(&self) -> usize {
        self.owned().map(ParamSpec::numel).sum()
    }

    /// Returns the unit's parameters without the aliases of tied weights.
    fn owned(&self) -> impl Iterator<Item = &ParamSpec> {
        self.params.iter().filter(|entry| !matches!(entry.placement, Placement::TiedTo(_)))
    }

    /// Returns the bytes of the unit's full gradients, in the dtypes of the autodiff graph and in
    /// the dtypes of the reduction. Full gradients that wait for a reduction have the latter.
    pub(crate) fn gradient_bytes(&self) -> (usize, usize) {
        let bytes = |of: fn(&ParamSpec) -> DType| {
            self.owned().map(|entry| entry.numel() * of(entry).size()).sum()
        };
        (bytes(|entry| entry.dtype), bytes(|entry| entry.reduce_dtype))
    }

    /// Returns the bytes of this rank's shards, in the dtypes in which they are sent.
    pub(crate) fn sent_bytes(&self) -> usize {
        let sharded = |entry: &&ParamSpec| matches!(entry.placement, Placement::Shard(_));
        let sent = self.params.iter().filter(sharded);
        sent.map(|entry| entry.range().len() * entry.dtype.size()).sum()
    }

    /// Returns the most bytes of shards that one all-gather of this unit casts, or copies to the
    /// device, before sending.
    ///
    /// `offloaded` says that the shards are stored on the host.
    pub(super) fn sending_bytes(&self, offloaded: bool) -> usize {
        let mut bytes = vec![0; self.layout.ranges().len()];
        for (at, entry) in self.params.iter().enumerate() {
            let made = offloaded || entry.dtype != DType::F32;
            if made && matches!(entry.placement, Placement::Shard(_)) {
                bytes[self.gathered_at(at).0] += entry.range().len() * entry.dtype.size();
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

    /// Returns the bytes of the shards and of the replicated parameters that this rank stores in
    /// f32.
    pub(crate) fn stored_bytes(&self) -> (usize, usize) {
        let bytes = |entry: &ParamSpec| entry.range().len() * size_of::<f32>();
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

/// Assigns gather buffers to units, at most `ring` buffers of a dtype to an inner nesting level.
pub(crate) fn gather_buffer_plan(units: &[Unit], ring: usize) -> GatherBufferPlan {
    let buffers: Vec<_> = units.iter().map(|unit| (unit.level, unit.buffers())).collect();
    GatherBufferPlan::new(&buffers, ring)
}
