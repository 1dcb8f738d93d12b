//! One unit: its parameters, where they lie, and its states `Sharded → Unsharding → Unsharded`.
//!
//! Transitions are idempotent. Which unit goes through which, and when, is the schedule's matter.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use burn::tensor::DType;

use crate::backend::{Float, Leaf, ShardBackend, Stored, Tracked};
use crate::collectives::Reduce;
use crate::collectives::comm::Work;
use crate::memory::Counted;
use crate::mesh::Mesh;
use crate::param::{CallId, Place};
use crate::precision::Precision;
use crate::recompute::{Kept, KeptInput};
use crate::slot::SlotPlan;
use crate::unit_layout::UnitLayout;

/// How a parameter is held between steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    /// As this rank's fragment, the given elements of the flattened parameter.
    Fragment(Range<usize>),
    /// Whole, on every rank: vectors, small matrices, and everything under `NO_SHARD`.
    Whole,
    /// Whole, and each rank's own: an ignored parameter or a running statistic, which is of no unit.
    Own,
    /// Not at all: the entry it is tied to holds it.
    TiedTo(usize),
}

/// One parameter of a unit.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// Its module path.
    pub(crate) path: String,
    /// Its full shape.
    pub(crate) shape: Vec<usize>,
    /// The type it is computed with, and gathered in.
    pub(crate) dtype: DType,
    /// The type that its gradient travels in when it is reduced.
    pub(crate) reduce_dtype: DType,
    /// How it is held.
    pub(crate) held: Held,
    /// Its matrix's number in the unit's layout; also under `NO_SHARD`, where it says in which order
    /// the gradient norm is summed.
    pub(crate) segment: Option<usize>,
}

impl Entry {
    /// Elements of the full parameter.
    pub(crate) fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Elements this rank holds, in elements of the flattened parameter.
    pub(crate) fn range(&self) -> Range<usize> {
        match &self.held {
            Held::Fragment(range) => range.clone(),
            Held::Whole | Held::Own => 0..self.numel(),
            Held::TiedTo(_) => 0..0,
        }
    }

    /// The shape of the base: a fragment keeps the rank of its parameter, and an empty one is one
    /// element that never gets a gradient.
    pub(crate) fn base_shape(&self) -> Vec<usize> {
        if matches!(self.held, Held::Whole | Held::Own) {
            return self.shape.clone();
        }
        let mut shape = vec![1; self.shape.len()];
        shape[0] = self.range().len().max(1);
        shape
    }

    /// What this rank keeps of the reduced gradient, which travels as `dtype`.
    pub(crate) fn reduce(&self, dtype: DType) -> Reduce {
        let segment = self.segment.filter(|_| matches!(self.held, Held::Fragment(_)));
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
    pub(crate) entries: Vec<Entry>,
    /// Where its matrices lie.
    pub(crate) layout: UnitLayout,
    /// Whether it holds fragments, and so needs buffers to gather them in.
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
        self.owned().map(Entry::numel).sum()
    }

    /// Its entries but for those that another one holds.
    fn owned(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| !matches!(entry.held, Held::TiedTo(_)))
    }

    /// Bytes of its full gradients as they arrive, and as they are reduced or held until then.
    pub(crate) fn gradient_bytes(&self) -> (usize, usize) {
        let bytes = |of: fn(&Entry) -> DType| {
            self.owned().map(|entry| entry.numel() * of(entry).size()).sum()
        };
        (bytes(|entry| entry.dtype), bytes(|entry| entry.reduce_dtype))
    }

    /// Bytes of this rank's fragments in the types in which they are sent.
    pub(crate) fn sent_bytes(&self) -> usize {
        let sharded = |entry: &&Entry| matches!(entry.held, Held::Fragment(_));
        let sent = self.entries.iter().filter(sharded);
        sent.map(|entry| entry.range().len() * entry.dtype.size()).sum()
    }

    /// Bytes of the fragments that are cast or copied to be sent, in the all-gather of this unit that
    /// has the most; `offloaded` says that they rest on the host.
    pub(crate) fn sending_bytes(&self, offloaded: bool) -> usize {
        let mut bytes = vec![0; self.layout.ranges().len()];
        for (at, entry) in self.entries.iter().enumerate() {
            let made = offloaded || entry.dtype != DType::F32;
            if made && matches!(entry.held, Held::Fragment(_)) {
                bytes[self.gathered_at(at).0] += entry.range().len() * entry.dtype.size();
            }
        }
        bytes.into_iter().max().unwrap_or(0)
    }

    /// Bytes of what every rank holds whole, in the types in which it is computed with.
    pub(crate) fn whole_bytes(&self) -> usize {
        let whole = self.entries.iter().filter(|entry| entry.held == Held::Whole);
        whole.map(|entry| entry.numel() * entry.dtype.size()).sum()
    }

    /// Bytes that this rank holds of it between steps: fragments, and what is replicated.
    pub(crate) fn held_bytes(&self) -> (usize, usize) {
        let bytes = |entry: &Entry| entry.range().len() * size_of::<f32>();
        let (mut fragments, mut replicated) = (0, 0);
        for entry in &self.entries {
            match entry.held {
                Held::Fragment(_) => fragments += bytes(entry),
                _ => replicated += bytes(entry),
            }
        }
        (fragments, replicated)
    }

    /// The entry that holds an entry's values: itself, unless tied.
    pub(crate) fn holder(&self, entry: usize) -> usize {
        match self.entries[entry].held {
            Held::TiedTo(first) => first,
            _ => entry,
        }
    }

    /// The parts of an entry's gradient whose squares `mesh.rank` sums up for the norm, and the
    /// shard's rank each belongs to: one's own fragment, or, of a whole matrix, every rank's.
    pub(crate) fn norm_ranges(&self, entry: usize, mesh: Mesh) -> Vec<(usize, Range<usize>)> {
        let entry = &self.entries[entry];
        match (&entry.held, entry.segment) {
            (Held::Fragment(range), _) => vec![(mesh.shard_rank().index(), 0..range.len())],
            (Held::Whole, Some(segment)) => mesh
                .shard_size()
                .ranks()
                .map(|rank| (rank.index(), self.layout.fragment(segment, rank)))
                .collect(),
            _ => Vec::new(),
        }
    }
}

/// The buffers of a model, `ring` to a nesting level.
pub(crate) fn slot_plan(units: &[Unit], ring: usize) -> SlotPlan {
    let buffers: Vec<_> = units.iter().map(|unit| (unit.level, unit.buffers())).collect();
    SlotPlan::new(&buffers, ring)
}

/// Where a unit's matrices are.
#[derive(Debug, Default)]
pub(crate) enum Residency {
    /// In fragments alone.
    #[default]
    Sharded,
    /// On their way into the unit's slots.
    Unsharding(Work<()>),
    /// In the unit's slots.
    Unsharded,
}

/// A fragment read from the module.
#[derive(Debug)]
pub(crate) struct Fragment<B: ShardBackend> {
    /// Its elements, in f32.
    pub(crate) value: Stored<B>,
    /// Its autodiff leaf, where it has one.
    pub(crate) leaf: Option<Leaf<B>>,
    /// What it is on the device, where it rests on the host: what it was sent as, where that is kept
    /// from forward to backward; whole, while its unit is unsharded.
    pub(crate) on_device: Arc<OnceLock<Float<B>>>,
}

impl<B: ShardBackend> Fragment<B> {
    pub(crate) fn new(value: Stored<B>, leaf: Option<Leaf<B>>) -> Self {
        Self { value, leaf, on_device: Arc::default() }
    }
}

impl<B: ShardBackend> Clone for Fragment<B> {
    fn clone(&self) -> Self {
        let Self { value, leaf, on_device } = self;
        Self { value: value.clone(), leaf: leaf.clone(), on_device: on_device.clone() }
    }
}

fn none<T>(len: usize) -> Vec<Option<T>> {
    std::iter::repeat_with(|| None).take(len).collect()
}

/// A unit at run time.
#[derive(Debug)]
pub(crate) struct UnitState<B: ShardBackend> {
    /// Where its matrices are.
    pub(crate) residency: Residency,
    /// What the module held when it was last read; gathered from in forward and backward alike.
    pub(crate) fragments: Vec<Option<Fragment<B>>>,
    /// The forwards under way, outermost first.
    pub(crate) forwards: Vec<CallId>,
    /// How many of its calls are between `pre_backward` and `post_backward`.
    pub(crate) backwards: usize,
    /// Whether it was unsharded ahead of use and has not been used yet.
    pub(crate) prefetched: bool,
    /// Bytes of what was copied to the device with it.
    pub(crate) copied: usize,
    /// Reduced gradients, as they are handed to the optimizer.
    pub(crate) reduced: Vec<Option<Stored<B>>>,
    /// Full gradients of earlier micro-batches, where they are held unsharded.
    pub(crate) held: Vec<Option<Float<B>>>,
    /// Whether this rank keeps a part of its gathered parameters, for the backward to gather from.
    pub(crate) kept_part: bool,
}

impl<B: ShardBackend> UnitState<B> {
    pub(crate) fn new(entries: usize) -> Self {
        Self {
            residency: Residency::Sharded,
            fragments: none(entries),
            forwards: Vec::new(),
            backwards: 0,
            prefetched: false,
            copied: 0,
            reduced: none(entries),
            held: none(entries),
            kept_part: false,
        }
    }

    /// Whether its buffers must not be given to another unit.
    pub(crate) fn in_use(&self) -> bool {
        !self.forwards.is_empty() || self.backwards > 0
    }
}

/// One forward of a unit, until its gradients are reduced.
#[derive(Debug)]
pub(crate) struct Call<B: ShardBackend> {
    /// The unit.
    pub(crate) unit: usize,
    /// Inputs that order its gathers; kept during forward only.
    pub(crate) anchors: Vec<Tracked<B>>,
    /// The id of the input recorded last, and of the output: ids are given in order of recording.
    pub(crate) span: (Option<u64>, Option<u64>),
    /// Gathers recorded whose gradient has not arrived.
    pub(crate) pending: usize,
    /// Full gradients that have arrived, an entry each.
    pub(crate) gradients: Vec<Option<Float<B>>>,
    /// Whether its `pre_backward` has run.
    pub(crate) entered: bool,
    /// Whether an output of it is tracked.
    pub(crate) tracked: bool,
    /// Whether it used a gathered parameter that has no gradient: ops that read it may run backward
    /// after the last gradient has arrived.
    pub(crate) reads_frozen: bool,
    /// Held by the ops of its graph.
    pub(crate) alive: std::sync::Weak<()>,
    /// Kept until its forward ends.
    pub(crate) open: Option<Arc<()>>,
    /// The call whose recomputation it is part of.
    pub(crate) part_of: Option<CallId>,
    /// What its forward takes along to be run again, where it is checkpointed.
    pub(crate) checkpoint: Option<Checkpoint<B>>,
    /// The leaves that its tied places took theirs from, for the second run of its forward: another
    /// forward, without a graph, may have read the same parameters since.
    pub(crate) tied: Vec<(Place, Leaf<B>)>,
}

/// A checkpointed forward under way.
#[derive(Debug)]
pub(crate) struct Checkpoint<B: ShardBackend> {
    /// Its inputs, in the order in which they were detached.
    pub(crate) inputs: Vec<KeptInput>,
    /// How many of them are stowed until backward.
    pub(crate) stowed: usize,
    /// Their bytes.
    pub(crate) bytes: usize,
    /// The tracked ones, or a leaf in their place.
    pub(crate) parents: Vec<Tracked<B>>,
    /// What is kept, once it has run.
    pub(crate) kept: Option<Arc<Kept<B>>>,
    /// The parent of its outputs, once there is one.
    pub(crate) parent: Option<Tracked<B>>,
}

impl<B: ShardBackend> Checkpoint<B> {
    pub(crate) fn new(parents: Vec<Tracked<B>>) -> Self {
        Self { inputs: Vec::new(), stowed: 0, bytes: 0, parents, kept: None, parent: None }
    }
}

impl<B: ShardBackend> Call<B> {
    /// A forward of `unit` that begins.
    pub(crate) fn new(unit: usize, entries: usize, anchors: Vec<Tracked<B>>) -> Self {
        let open = Arc::new(());
        Self {
            unit,
            span: (anchors.iter().map(|anchor| anchor.id().value).max(), None),
            anchors,
            pending: 0,
            gradients: none(entries),
            entered: false,
            tracked: false,
            reads_frozen: false,
            alive: Arc::downgrade(&open),
            open: Some(open),
            part_of: None,
            checkpoint: None,
            tied: Vec::new(),
        }
    }

    /// Whether a gradient has arrived.
    pub(crate) fn has_gradients(&self) -> bool {
        self.gradients.iter().any(Option::is_some)
    }
}

/// Adds gradients up, entry by entry, the earlier ones first.
pub(crate) fn add_up<T>(
    sums: &mut [Option<T>],
    gradients: impl IntoIterator<Item = Option<T>>,
    add: impl Fn(T, T) -> T,
) {
    for (sum, gradient) in sums.iter_mut().zip(gradients) {
        *sum = match (sum.take(), gradient) {
            (Some(sum), Some(gradient)) => Some(add(sum, gradient)),
            (sum, gradient) => sum.or(gradient),
        };
    }
}

/// What a reduction leaves of each parameter, and what counts it until it is at rest.
pub(crate) type Reduced<B> = (Vec<Option<Stored<B>>>, Option<Counted>);

/// A reduction under way: its unit, and the bytes of full gradients that it ends.
#[derive(Debug)]
pub(crate) struct Reduction<B: ShardBackend> {
    pub(crate) unit: usize,
    pub(crate) bytes: usize,
    pub(crate) work: Work<Reduced<B>>,
}
