//! The schedule of one sharded model on one rank: its fields and construction.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use burn::tensor::DType;

use super::buffers::{BuffersOfUnits, GatherBuffers};
use super::counters::{Counters, count};
use super::decide::Decisions;
use super::settings::Settings;
use super::state::State;
use crate::backend::{
    Float, ModelBackend, Raw, RawFloat, ShardBackend, StorageDevice, StoredTensor,
};
use crate::collectives::comm::Communicator;
use crate::collectives::device_work::DeviceWork;
use crate::collectives::group::AnyProcessGroup;
use crate::error::{CollectiveError, Error, IgnorePoison, ScheduleError};
use crate::module::{CallId, ParamIndex, RandomStream};
use crate::param_group::memory::{MemoryKind, MemoryTracker};
use crate::param_group::{ParamSpec, Unit};

/// The schedule of one sharded model on one rank.
pub(crate) struct Schedule<B: ModelBackend> {
    pub(super) settings: Settings,
    pub(super) device: B::Device,
    /// Handle to the communication thread, for the data parallel ranks.
    pub(super) comm: Arc<Communicator>,
    /// All ranks: the data parallel ranks, each with its tensor parallel ranks.
    pub(super) world: Arc<AnyProcessGroup>,
    /// Units in layout order.
    pub(super) units: Vec<Unit>,
    pub(super) random: Arc<RandomStream>,
    pub(super) counters: Counters,
    pub(super) tracker: Arc<MemoryTracker>,
    state: Mutex<State<B>>,
    this: Weak<Self>,
}

impl<B: ModelBackend> fmt::Debug for Schedule<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = self.units.len();
        f.debug_struct("Schedule").field("units", &units).finish_non_exhaustive()
    }
}

impl<B: ModelBackend> Schedule<B> {
    /// Creates a schedule over `units`, which are in layout order, and allocates the gather
    /// buffers, in addition to the `common` ones.
    pub(crate) fn new(
        settings: Settings,
        device: B::Device,
        (comm, world): (Arc<Communicator>, Arc<AnyProcessGroup>),
        units: Vec<Unit>,
        random: Arc<RandomStream>,
        common: BuffersOfUnits<Raw<B>>,
    ) -> Arc<Self> {
        let controls: Vec<_> = units.iter().map(|unit| unit.control.clone()).collect();
        let buffers =
            GatherBuffers::new(settings.timing.gather_buffers, &device, &units, &controls, common);
        let tracker = Arc::new(MemoryTracker::new(settings.storage != StorageDevice::Device));
        for (index, unit) in units.iter().enumerate() {
            let (shards, replicated) = unit.stored_bytes();
            tracker.take(MemoryKind::Shards, shards, index);
            tracker.take(MemoryKind::Replicated, replicated, index);
            if settings.keep_sent {
                tracker.take(MemoryKind::ShardCopies, unit.sent_bytes(), index);
            }
        }
        tracker.take(MemoryKind::GatherBuffers, buffers.bytes(), None);
        let state = State::new(&units, buffers, controls, &settings);
        Arc::new_cyclic(|this| Self {
            settings,
            device,
            comm,
            world,
            units,
            random,
            counters: Counters::default(),
            tracker,
            state: Mutex::new(state),
            this: this.clone(),
        })
    }

    /// Locks the state. A panic under the lock ends the rank, and destructors that run while it
    /// unwinds may still read the state, so a poisoned lock is no error.
    pub(super) fn lock(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock().ignore_poison()
    }

    /// Returns the shared handle of the schedule.
    pub(super) fn this(&self) -> Arc<Self> {
        self.this.upgrade().expect("a schedule is only reached through its `Arc`")
    }

    /// Returns the unit and the specification of a parameter.
    pub(super) fn param(&self, index: ParamIndex) -> (&Unit, &ParamSpec) {
        let unit = &self.units[index.unit];
        (unit, &unit.params[index.param])
    }

    /// Returns the name of a call's unit, for messages; empty if the call has ended.
    pub(super) fn name_of(&self, id: CallId) -> String {
        let unit = self.lock().calls.get(&id).map(|call| call.unit);
        unit.map_or_else(String::new, |unit| self.units[unit].name.to_string())
    }

    /// Issues a collective on tensors that this thread has written.
    pub(super) fn issue<T: Send + 'static>(
        &self,
        group: &Arc<AnyProcessGroup>,
        collective: impl FnOnce(&AnyProcessGroup) -> Result<T, CollectiveError> + Send + 'static,
    ) -> DeviceWork<Raw<B>, T> {
        self.issue_after(group, || Raw::<B>::fence(&self.device), collective)
    }

    /// Issues a collective on tensors that were written by the operations that `after` marks.
    ///
    /// A single rank has no one to communicate with. On a device that runs operations later, its
    /// own thread issues the collective: this takes no fences, and the device does not wait for the
    /// host.
    pub(super) fn issue_after<T: Send + 'static>(
        &self,
        group: &Arc<AnyProcessGroup>,
        after: impl FnOnce() -> <Raw<B> as ShardBackend>::Fence,
        collective: impl FnOnce(&AnyProcessGroup) -> Result<T, CollectiveError> + Send + 'static,
    ) -> DeviceWork<Raw<B>, T> {
        let is_alone = self.world.size() == 1 && group.shares_device::<Raw<B>>();
        // Copies from the host take the host's time, and so run on the communication thread.
        let stays_on_device = self.settings.storage == StorageDevice::Device;
        if is_alone && stays_on_device {
            return DeviceWork::Issued(collective(group));
        }
        DeviceWork::issue(&self.comm, group, &self.device, after(), collective)
    }

    /// Returns the buffer of a stored tensor, in f32 on the compute device.
    pub(super) fn on_device(&self, tensor: StoredTensor<B>) -> RawFloat<B> {
        let mut buffers = self.lower(vec![tensor]);
        let buffer = buffers.pop().expect("`lower` returns as many buffers");
        buffer.on_device(&self.device, DType::F32, self.settings.storage)
    }

    /// Returns the buffers of tensors on the device, and counts the lowering.
    pub(super) fn lower_values(&self, tensors: Vec<Float<B>>) -> Vec<RawFloat<B>> {
        if !tensors.is_empty() {
            self.count_lowering();
        }
        B::lower(tensors)
    }

    fn count_lowering(&self) {
        if B::RECORDS {
            count(&self.counters.lowerings);
            count(&self.counters.drains);
        }
    }

    /// Returns the buffers of stored tensors, and counts the lowering.
    pub(super) fn lower(&self, tensors: Vec<StoredTensor<B>>) -> Vec<StoredTensor<Raw<B>>> {
        if tensors.iter().any(|tensor| matches!(tensor, StoredTensor::Device(_))) {
            self.count_lowering();
        }
        StoredTensor::lower(tensors)
    }

    /// Launches the operations that this thread has recorded, and counts that.
    pub(super) fn drain(&self) {
        if B::RECORDS {
            count(&self.counters.drains);
            B::drain(&self.device);
        }
    }

    /// Returns the error for the use of a parameter that has not been loaded yet.
    pub(super) fn not_loaded(&self, index: ParamIndex) -> Error {
        ScheduleError::NotLoaded { path: self.param(index).1.path.clone() }.into()
    }

    /// Returns what decides when units are gathered, at this moment.
    pub(super) fn decisions<'a>(&'a self, state: &'a State<B>) -> Decisions<'a> {
        Decisions {
            units: &self.units,
            controls: &state.controls,
            timing: &self.settings.timing,
            order: &state.order,
            recomputes: state.recompute.second_run.is_some(),
        }
    }

    /// Returns the index of the part of a gathered unit that this rank keeps under
    /// `ReshardAfterForward::To`.
    pub(super) fn kept_part_index(&self, group: &AnyProcessGroup) -> usize {
        self.settings.mesh.shard_rank().index() % group.size()
    }
}
