//! The counters of a schedule: operations, bytes and times.

use std::time::Duration;

use super::core::Schedule;
use super::counters::Counts;
use crate::backend::{ModelBackend, Raw, ShardBackend, StorageDevice};
use crate::error::Error;
use crate::module::ParamIndex;
use crate::param_group::memory::{Counted, Memory, MemoryHandle, MemoryKind, StateSize};

/// The metrics of a schedule on this rank.
pub(crate) trait ScheduleMetrics {
    /// Returns the numbers of operations since the model was sharded.
    fn counts(&self) -> Counts;
    /// Returns the maximum number of bytes of gathered parameters at any time.
    fn peak_unsharded_bytes(&self) -> usize;
    /// Returns the size of all gather buffers, in bytes.
    fn gather_buffer_bytes(&self) -> usize;
    /// Returns how long collectives took, and how long this rank waited for their results.
    fn communication_time(&self) -> (Duration, Duration);
    /// Returns how often this rank blocked on the result of a collective.
    fn waits(&self) -> usize;
    /// Returns the memory that the model uses on the device, by kind.
    fn memory(&self) -> Memory;
    /// Returns the memory that the model uses on the host in place of the device, by kind.
    fn host_memory(&self) -> Memory;
    /// Sets the size of the optimizer's state, as the program measured it.
    fn record_optimizer(&self, bytes: usize, of_probes: usize);
    /// Sets the size of the optimizer's state after a step, as the optimizers of this crate report it.
    fn report_optimizer(&self, size: StateSize);
    /// Counts the copy in f32 of a parameter that is being stepped, until the value is dropped.
    fn count_step_copy(&self, index: ParamIndex) -> Counted;
    /// Counts the averages of parameters, of a size in bytes, until the returned value is dropped.
    fn count_average(&self, bytes: usize) -> Counted;
    /// Returns access to the accounting of memory that outlives the schedule.
    fn memory_handle(&self) -> MemoryHandle;
    /// Marks the end of a step of the optimizer in the record of memory over time.
    fn mark_step(&self);
    /// Sets the most bytes that the model may take on the device; `None` for no limit.
    fn set_memory_limit(&self, limit: Option<usize>);
}

impl<B: ModelBackend> ScheduleMetrics for Schedule<B> {
    fn counts(&self) -> Counts {
        self.counters.read()
    }

    fn peak_unsharded_bytes(&self) -> usize {
        self.counters.peak_unsharded_bytes()
    }

    fn gather_buffer_bytes(&self) -> usize {
        self.lock().buffers.bytes()
    }

    fn communication_time(&self) -> (Duration, Duration) {
        self.comm.times()
    }

    fn waits(&self) -> usize {
        self.comm.waits()
    }

    fn memory(&self) -> Memory {
        let lacks_optimizer = self.tracker.lacks_optimizer(false);
        Memory { lacks_optimizer, ..self.tracker.device() }
    }

    fn host_memory(&self) -> Memory {
        let lacks_optimizer = self.tracker.lacks_optimizer(true);
        Memory { lacks_optimizer, ..self.tracker.host() }
    }

    fn record_optimizer(&self, bytes: usize, of_probes: usize) {
        self.tracker.set_measured_optimizer();
        let with_params =
            Raw::<B>::IN_HOST_MEMORY || self.settings.storage != StorageDevice::Device;
        if with_params {
            return self.tracker.set(MemoryKind::Optimizer, bytes + of_probes);
        }
        self.tracker.set(MemoryKind::Optimizer, bytes);
        self.tracker.set(MemoryKind::OptimizerProbes, of_probes);
    }

    fn report_optimizer(&self, size: StateSize) {
        match size {
            StateSize::Known { params, probes } => self.record_optimizer(params, probes),
            StateSize::Unknown => self.tracker.set_unknown_optimizer(),
        }
    }

    fn count_step_copy(&self, index: ParamIndex) -> Counted {
        let bytes = self.param(index).1.range().len() * size_of::<f32>();
        Counted::new(&self.tracker, MemoryKind::StepCopies, bytes, index.unit)
    }

    fn count_average(&self, bytes: usize) -> Counted {
        Counted::new(&self.tracker, MemoryKind::Averages, bytes, None)
    }

    fn memory_handle(&self) -> MemoryHandle {
        let paths = self.units.iter().map(|unit| unit.path.clone());
        MemoryHandle::new(self.tracker.clone(), paths)
    }

    fn mark_step(&self) {
        self.tracker.mark_step();
    }

    fn set_memory_limit(&self, limit: Option<usize>) {
        self.tracker.set_limit(limit);
    }
}

impl<B: ModelBackend> Schedule<B> {
    /// Returns an error if the model has taken more memory on the device than its limit.
    pub(super) fn check_memory_limit(&self) -> Result<(), Error> {
        Ok(self.tracker.check_limit(&|unit| self.units[unit].path.clone())?)
    }
}
