//! When each unit is unsharded, resharded and reduced.
//!
//! *Forward*: `pre_forward` of unit k waits for its unshard and issues that of the unit that came
//! next in the last forward (forward prefetch); `post_forward` reshards, but for the outermost unit
//! and the last one, whose backward is next. *Backward*: `pre_backward` of k waits for its unshard
//! and issues that of the unit that came before it (`BACKWARD_PRE`); `post_backward`, when the last
//! gradient of a call has arrived, reshards and issues the reduce-scatter. The next unit's first
//! gradient waits for it, so that full gradients of one unit exist at a time.
//!
//! Everything runs on the rank's own thread, but for the collectives, which its communication
//! thread runs in the order in which they were issued here: the static layout and the order of
//! forwards fix it, so all ranks issue the same sequence. A prefetch is made only into a buffer that
//! nobody uses, and one that turns out wrong costs a gather and nothing else.
//!
//! *Checkpointed units*: forward records nothing in them; their backward is one op, which unshards,
//! runs the forward again and then its backward (`recompute.rs`).
//!
//! Every step is told to `tracing`, target `fsdp`, in the order in which it is taken.

mod backward;
mod engine;
mod forward;
mod recompute;
mod unshard;
mod whole;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

pub(crate) use engine::Engine;
pub(crate) use whole::{Step, Whole};

use burn::tensor::DType;

use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{Float, ShardBackend, StorageDevice, StoredTensor};
use crate::collectives::comm::Communicator;
use crate::collectives::group::{Group, MeshGroups};
use crate::error::{Error, ScheduleError};
use crate::layout::Mesh;
use crate::module::RandomStream;
use crate::module::{CallId, ParamIndex};
use crate::options::{BackwardPrefetch, GradientAccumulation, ShardingStrategy};
use crate::param_group::memory::{MemoryKind, MemoryTracker};
use crate::param_group::{Unit, gather_buffer_plan};
use crate::runtime::state::{Call, Reduction, UnitState};

/// How often a rank did what, since its model was sharded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// All-gathers of a unit's matrices, one for each type that they have.
    pub all_gathers: usize,
    /// All-gathers of one parameter, for a `val()` outside its unit's forward.
    pub single_gathers: usize,
    /// Bytes of its own that the rank has given to the all-gathers of units.
    pub sent_bytes: usize,
    /// Reductions of a unit's gradients, its replicated parameters included: reduce-scatters, or
    /// all-reduces where nothing is sharded.
    pub reduce_scatters: usize,
    /// All-reduces of a unit's gradient shards across the copies of a hybrid strategy.
    pub all_reduces: usize,
    /// Units unsharded ahead of use that were not used next.
    pub mis_prefetches: usize,
    /// Buffers added because two units of one ring were live at once.
    pub added_slots: usize,
}

#[derive(Debug, Default)]
struct Counters {
    all_gathers: AtomicUsize,
    single_gathers: AtomicUsize,
    sent_bytes: Arc<AtomicUsize>,
    reduce_scatters: AtomicUsize,
    all_reduces: AtomicUsize,
    mis_prefetches: AtomicUsize,
    added_slots: AtomicUsize,
    unsharded_bytes: AtomicUsize,
    peak_unsharded_bytes: AtomicUsize,
}

fn count(counter: &AtomicUsize) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// How a schedule runs, as the options and the mesh have it.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// What is sharded.
    pub(crate) strategy: ShardingStrategy,
    /// This rank's place.
    pub(crate) mesh: Mesh,
    /// Its groups.
    pub(crate) groups: MeshGroups,
    /// What becomes of gathered parameters after forward.
    pub(crate) reshard: Reshard,
    /// How many slots the units of an inner nesting level share.
    pub(crate) slots: usize,
    /// Whether to unshard the next unit in forward.
    pub(crate) forward_prefetch: bool,
    /// When to unshard the previous unit in backward.
    pub(crate) backward_prefetch: BackwardPrefetch,
    /// What becomes of the gradients of a micro-batch.
    pub(crate) accumulation: GradientAccumulation,
    /// Where parameters, reduced gradients and optimizer state rest.
    pub(crate) rest: StorageDevice,
    /// Whether what was sent to an all-gather is kept from forward to backward.
    pub(crate) keep_sent: bool,
    /// Whether the inputs of checkpointed units rest on the host.
    pub(crate) offload_activations: bool,
}

/// What becomes of gathered parameters after forward.
#[derive(Clone, Debug)]
pub(crate) enum Reshard {
    /// They stay.
    Never,
    /// They go.
    Always,
    /// Each rank keeps a part, to gather from among these neighbours.
    To(Arc<Group>),
}

/// What an all-gather is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    Forward,
    Backward,
}

/// Whether a unit is unsharded for use now, or ahead of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    Now,
    Ahead,
}

/// The schedule of one sharded model on one rank.
pub(crate) struct Schedule<B: ShardBackend> {
    settings: Settings,
    device: B::Device,
    comm: Arc<Communicator>,
    units: Vec<Unit>,
    random: Arc<RandomStream>,
    counters: Counters,
    tracker: Arc<MemoryTracker>,
    state: Mutex<State<B>>,
    this: Weak<Self>,
}

impl<B: ShardBackend> fmt::Debug for Schedule<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = self.units.len();
        f.debug_struct("Schedule").field("units", &units).finish_non_exhaustive()
    }
}

struct State<B: ShardBackend> {
    units: Vec<UnitState<B>>,
    /// The buffers, the unit in each, and those that each unit uses, one for each of its flat ranges.
    slots: Vec<Arc<GatherBuffer<B>>>,
    owners: Vec<Option<usize>>,
    slots_of: Vec<Vec<usize>>,
    /// What this rank keeps of each flat range of each unit after forward, under `To`.
    parts: Vec<Vec<Arc<GatherBuffer<B>>>>,
    calls: BTreeMap<CallId, Call<B>>,
    next_call: u64,
    /// Hooked forwards under way.
    open: usize,
    /// Units in the order of their forwards: this time, and the time before.
    order: Vec<usize>,
    last_order: Vec<usize>,
    /// Calls that run backward, and the depth down to which all their ops have run.
    running: Vec<Running>,
    /// The checkpointed forward under way: nothing is recorded until it ends.
    unrecorded: Option<CallId>,
    /// The call whose forward is run again, or whose backward then runs.
    recomputing: Option<CallId>,
    reductions: VecDeque<Reduction<B>>,
    /// Whether this backward pass is one of several whose gradients are added up, and not the last.
    accumulating: bool,
    /// Bytes of reduced gradients handed out and counted until the next forward.
    reduced_bytes: usize,
    /// Parameters that were not initialised, as they are to be loaded.
    unloaded: BTreeSet<ParamIndex>,
}

/// A call between its `pre_backward` and the depth of its inputs.
#[derive(Clone, Copy, Debug)]
struct Running {
    call: CallId,
    unit: usize,
    inputs: usize,
    /// Whether its slot is needed down to there, though all gradients have arrived.
    reads_frozen: bool,
}

impl<B: ShardBackend> Schedule<B> {
    /// A schedule over `units`, in layout order.
    pub(crate) fn new(
        settings: Settings,
        device: B::Device,
        comm: Arc<Communicator>,
        units: Vec<Unit>,
        random: Arc<RandomStream>,
    ) -> Arc<Self> {
        let ring = match settings.reshard {
            Reshard::Never => units.len(),
            _ => settings.slots,
        };
        let plan = gather_buffer_plan(&units, ring);
        let new = |(numel, dtype)| Arc::new(GatherBuffer::<B>::new(&device, numel, dtype));
        let slots: Vec<_> = plan.buffers.into_iter().map(new).collect();
        let parts = |unit: &Unit| match &settings.reshard {
            Reshard::To(group) => unit.parts(group.size()).into_iter().map(new).collect(),
            _ => Vec::new(),
        };
        let parts: Vec<Vec<_>> = units.iter().map(parts).collect();
        let tracker = Arc::new(MemoryTracker::new(settings.rest != StorageDevice::Device));
        for unit in &units {
            let (shards, replicated) = unit.held_bytes();
            tracker.take(MemoryKind::Shards, shards);
            tracker.take(MemoryKind::Replicated, replicated);
            if settings.keep_sent {
                tracker.take(MemoryKind::Sent, unit.sent_bytes());
            }
        }
        for slot in slots.iter().chain(parts.iter().flatten()) {
            tracker.take(MemoryKind::Gathered, slot.bytes());
        }
        let state = State {
            units: units.iter().map(|unit| UnitState::new(unit.entries.len())).collect(),
            owners: vec![None; slots.len()],
            slots,
            slots_of: plan.buffers_of,
            parts,
            calls: BTreeMap::new(),
            next_call: 0,
            open: 0,
            order: Vec::new(),
            last_order: (0..units.len()).collect(),
            running: Vec::new(),
            unrecorded: None,
            recomputing: None,
            reductions: VecDeque::new(),
            accumulating: false,
            reduced_bytes: 0,
            unloaded: BTreeSet::new(),
        };
        Arc::new_cyclic(|this| Self {
            settings,
            device,
            comm,
            units,
            random,
            counters: Counters::default(),
            tracker,
            state: Mutex::new(state),
            this: this.clone(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State<B>> {
        // A panic while the lock is held ends the rank; what unwinds may still look at the state.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn this(&self) -> Arc<Self> {
        self.this.upgrade().expect("a schedule is only reached through its `Arc`")
    }

    fn place(&self, place: ParamIndex) -> (&Unit, &crate::param_group::ParamSpec) {
        let unit = &self.units[place.unit];
        (unit, &unit.entries[place.entry])
    }

    /// The name of a call's unit.
    fn name_of(&self, id: CallId) -> String {
        let unit = self.lock().calls.get(&id).map(|call| call.unit);
        unit.map_or_else(String::new, |unit| self.units[unit].name.to_string())
    }

    /// A tensor at rest, in f32 on the device.
    fn on_device(&self, tensor: StoredTensor<B>) -> Float<B> {
        tensor.on_device(&self.device, DType::F32, self.settings.rest)
    }

    /// The error of using a parameter that was to be loaded, and is not yet.
    fn not_loaded(&self, place: ParamIndex) -> Error {
        ScheduleError::NotLoaded { path: self.place(place).1.path.clone() }.into()
    }

    /// The next unit in `order` with a slot on the same level.
    fn following<'a>(&self, order: impl Iterator<Item = &'a usize>, unit: usize) -> Option<usize> {
        let level = self.units[unit].level;
        let fits = |&&index: &&usize| {
            index != unit && self.units[index].level == level && self.units[index].gathers
        };
        order.into_iter().find(fits).copied()
    }
}
