//! The counters of a schedule: operations, bytes and times.

use std::time::Duration;

use super::core::Schedule;
use super::counters::Counts;
use crate::backend::{ModelBackend, Raw, ShardBackend, StorageDevice};
use crate::module::ParamIndex;
use crate::param_group::memory::{Counted, Memory, MemoryKind, MemoryTimeline};

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
    /// Sets the size of the optimizer's state, in bytes: that of parameters, and that of the probes of
    /// the optimizer's check.
    fn record_optimizer(&self, bytes: usize, of_probes: usize);
    /// Counts the copy in f32 of a parameter that is being stepped, until the value is dropped.
    fn count_step_copy(&self, index: ParamIndex) -> Counted;
    /// Counts the averages of parameters, of a size in bytes, until the returned value is dropped.
    fn count_average(&self, bytes: usize) -> Counted;
    /// Starts a record of at most `max_samples` changes of memory.
    fn start_memory_timeline(&self, max_samples: usize);
    /// Returns the record of changes of memory so far, if one is kept.
    fn memory_timeline(&self) -> Option<MemoryTimeline>;
    /// Ends the record of changes of memory.
    fn stop_memory_timeline(&self);
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
        self.tracker.device()
    }

    fn host_memory(&self) -> Memory {
        self.tracker.host()
    }

    fn record_optimizer(&self, bytes: usize, of_probes: usize) {
        let with_params =
            Raw::<B>::IN_HOST_MEMORY || self.settings.storage != StorageDevice::Device;
        if with_params {
            return self.tracker.set(MemoryKind::Optimizer, bytes + of_probes);
        }
        self.tracker.set(MemoryKind::Optimizer, bytes);
        self.tracker.set(MemoryKind::OptimizerProbes, of_probes);
    }

    fn count_step_copy(&self, index: ParamIndex) -> Counted {
        let bytes = self.param(index).1.range().len() * size_of::<f32>();
        Counted::new(&self.tracker, MemoryKind::StepCopies, bytes, index.unit)
    }

    fn count_average(&self, bytes: usize) -> Counted {
        Counted::new(&self.tracker, MemoryKind::Averages, bytes, None)
    }

    fn start_memory_timeline(&self, max_samples: usize) {
        self.tracker.start_timeline(max_samples);
    }

    fn memory_timeline(&self) -> Option<MemoryTimeline> {
        self.tracker.timeline(&|unit| self.units[unit].path.clone())
    }

    fn stop_memory_timeline(&self) {
        self.tracker.stop_timeline();
    }
}
