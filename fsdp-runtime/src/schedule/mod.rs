//! When each unit is unsharded, resharded and reduced.
//!
//! *Forward*: `pre_forward` of unit k waits for its unshard and issues that of the unit that came
//! next in the last forward (forward prefetch); `post_forward` reshards, but for the outermost unit
//! and the last one, whose backward is next. *Backward*: `pre_backward` of k waits for its unshard
//! and issues that of the unit that came before it (`BACKWARD_PRE`); `post_backward`, when the last
//! gradient of a call has arrived, issues the reduce-scatter and reshards. One reduce-scatter is
//! under way at a time, so gradients of no more than two units exist at once.
//!
//! Everything runs on the rank's own thread, but for the collectives, which its communication
//! thread runs in the order in which they were issued here: the static layout and the order of
//! forwards fix it, so all ranks issue the same sequence. A prefetch is made only into a buffer that
//! nobody uses, and one that turns out wrong costs a gather and nothing else.

mod backward;
mod engine;
mod forward;

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

pub(crate) use engine::Engine;

use crate::backend::ShardBackend;
use crate::collectives::comm::Communicator;
use crate::collectives::{Op, ProcessGroup};
use crate::error::{Error, ScheduleError};
use crate::group::{Call, Held, Reductions, Residency, Unit, UnitState};
use crate::mesh::Mesh;
use crate::nn::dropout::Stream;
use crate::param::{CallId, Place};
use crate::slot::{Slot, SlotPlan};

/// How often a rank did what, since its model was sharded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// All-gathers of a unit.
    pub all_gathers: usize,
    /// All-gathers of one parameter, for a `val()` outside its unit's forward.
    pub single_gathers: usize,
    /// Reduce-scatters of a unit, its replicated parameters included.
    pub reduce_scatters: usize,
    /// Units unsharded ahead of use that were not used next.
    pub mis_prefetches: usize,
}

#[derive(Debug, Default)]
struct Counters {
    all_gathers: AtomicUsize,
    single_gathers: AtomicUsize,
    reduce_scatters: AtomicUsize,
    mis_prefetches: AtomicUsize,
    unsharded_bytes: AtomicUsize,
    peak_unsharded_bytes: AtomicUsize,
}

fn count(counter: &AtomicUsize) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// The schedule of one sharded model on one rank.
#[derive(Debug)]
pub(crate) struct Schedule<B: ShardBackend> {
    mesh: Mesh,
    device: B::Device,
    comm: Arc<Communicator>,
    units: Vec<Unit>,
    slots: Vec<Arc<Slot<B>>>,
    ring: usize,
    prefetch: Prefetch,
    random: Arc<Stream>,
    counters: Counters,
    state: Mutex<State<B>>,
    this: Weak<Self>,
}

/// What is unsharded ahead of use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prefetch {
    pub(crate) forward: bool,
    pub(crate) backward: bool,
}

#[derive(Debug)]
struct State<B: ShardBackend> {
    units: Vec<UnitState<B>>,
    /// The unit in each slot.
    owners: Vec<Option<usize>>,
    calls: BTreeMap<CallId, Call<B>>,
    next_call: u64,
    /// Hooked forwards under way.
    open: usize,
    /// Units in the order of their forwards: this time, and the time before.
    order: Vec<usize>,
    last_order: Vec<usize>,
    reductions: Reductions<B>,
}

impl<B: ShardBackend> Schedule<B> {
    /// A schedule over `units`, in layout order, with `ring` slots for each inner nesting level.
    pub(crate) fn new(
        mesh: Mesh,
        device: B::Device,
        comm: Arc<Communicator>,
        mut units: Vec<Unit>,
        ring: usize,
        prefetch: Prefetch,
        random: Arc<Stream>,
    ) -> Arc<Self> {
        let gathered = |unit: &Unit| {
            let sharded = unit.entries.iter().any(|entry| matches!(entry.held, Held::Fragment(_)));
            if sharded { unit.layout.padded_len() } else { 0 }
        };
        let lens: Vec<_> = units.iter().map(|unit| (unit.level, gathered(unit))).collect();
        let plan = SlotPlan::new(&lens, ring);
        for (unit, slot) in units.iter_mut().zip(plan.slot_of) {
            unit.slot = slot;
        }
        let slots: Vec<_> =
            plan.numels.into_iter().map(|numel| Arc::new(Slot::new(&device, numel))).collect();
        let state = State {
            units: units.iter().map(|unit| UnitState::new(unit.entries.len())).collect(),
            owners: vec![None; slots.len()],
            calls: BTreeMap::new(),
            next_call: 0,
            open: 0,
            order: Vec::new(),
            last_order: (0..units.len()).collect(),
            reductions: VecDeque::new(),
        };
        Arc::new_cyclic(|this| Self {
            mesh,
            device,
            comm,
            units,
            slots,
            ring,
            prefetch,
            random,
            counters: Counters::default(),
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

    fn place(&self, place: Place) -> (&Unit, &crate::group::Entry) {
        let unit = &self.units[place.unit];
        (unit, &unit.entries[place.entry])
    }

    /// Issues the all-gather of a unit that is sharded. `ahead` of use, it gives way to a unit that
    /// uses the slot; otherwise that is an error.
    fn unshard(&self, state: &mut State<B>, index: usize, ahead: bool) -> Result<(), Error> {
        let unit = &self.units[index];
        let Some(slot) = unit.slot else { return Ok(()) };
        if !ahead {
            state.units[index].prefetched = false;
        }
        if !matches!(state.units[index].residency, Residency::Sharded) {
            return Ok(());
        }
        let mut fragments = Vec::new();
        for (entry, fragment) in unit.entries.iter().zip(&state.units[index].fragments) {
            let Held::Fragment(range) = &entry.held else { continue };
            let Some(fragment) = fragment else {
                if ahead {
                    return Ok(());
                }
                let unit = unit.name.to_string();
                return Err(ScheduleError::NotRead { unit, path: entry.path.clone() }.into());
            };
            if !range.is_empty() {
                let segment = entry.segment.expect("a sharded entry has a segment");
                let at = unit.layout.segment(segment).start + range.start;
                fragments.push((at, fragment.value.clone()));
            }
        }
        if let Some(owner) = state.owners[slot].filter(|&owner| owner != index) {
            if state.units[owner].in_use() {
                if ahead {
                    return Ok(());
                }
                return Err(ScheduleError::SlotBusy {
                    unit: unit.name.to_string(),
                    owner: self.units[owner].name.to_string(),
                    slots: self.ring,
                }
                .into());
            }
            self.evict(state, owner)?;
        }
        tracing::trace!(target: "fsdp", unit = %unit.name, ahead, "fsdp::unshard");
        count(&self.counters.all_gathers);
        let op = Op::new("all_gather", unit.name.clone());
        let (slot_memory, device) = (self.slots[slot].clone(), self.device.clone());
        let work = self.comm.issue(move |group| {
            ProcessGroup::<B>::all_gather(group, &op, fragments, &slot_memory)?;
            B::complete(&device);
            Ok(())
        });
        state.owners[slot] = Some(index);
        state.units[index].residency = Residency::Unsharding(work);
        state.units[index].prefetched = ahead;
        let now =
            self.counters.unsharded_bytes.fetch_add(unit.unsharded_bytes(), Ordering::Relaxed);
        let now = now + unit.unsharded_bytes();
        self.counters.peak_unsharded_bytes.fetch_max(now, Ordering::Relaxed);
        Ok(())
    }

    /// Waits until a unit that is being unsharded is.
    fn wait_for_unshard(&self, state: &mut State<B>, index: usize) -> Result<(), Error> {
        let residency = &mut state.units[index].residency;
        if matches!(residency, Residency::Unsharding(_)) {
            let Residency::Unsharding(work) = std::mem::take(residency) else { unreachable!() };
            work.wait()?;
            *residency = Residency::Unsharded;
        }
        Ok(())
    }

    /// Gives a unit's slot back.
    fn reshard(&self, state: &mut State<B>, index: usize) {
        if !matches!(state.units[index].residency, Residency::Unsharded) {
            return;
        }
        let unit = &self.units[index];
        tracing::trace!(target: "fsdp", unit = %unit.name, "fsdp::reshard");
        state.units[index].residency = Residency::Sharded;
        if let Some(slot) = unit.slot {
            state.owners[slot] = None;
            self.slots[slot].release();
            self.counters.unsharded_bytes.fetch_sub(unit.unsharded_bytes(), Ordering::Relaxed);
        }
    }

    /// Reshards a unit that nothing uses, whatever state it is in.
    fn evict(&self, state: &mut State<B>, index: usize) -> Result<(), Error> {
        if std::mem::take(&mut state.units[index].prefetched) {
            count(&self.counters.mis_prefetches);
        }
        self.wait_for_unshard(state, index)?;
        self.reshard(state, index);
        Ok(())
    }

    /// The next unit in `order` after position `at` with a slot on the same level.
    fn following<'a>(&self, order: impl Iterator<Item = &'a usize>, unit: usize) -> Option<usize> {
        let level = self.units[unit].level;
        let fits = |&&index: &&usize| {
            index != unit && self.units[index].level == level && self.units[index].slot.is_some()
        };
        order.into_iter().find(fits).copied()
    }
}
