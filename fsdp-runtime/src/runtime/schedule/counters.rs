//! Counters of the operations that the schedule of one rank has run.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Numbers of operations on one rank, since its model was sharded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// All-gathers of a unit's matrices, one for each dtype and storage type that the unit has. On
    /// CubeCL devices f32 matrices that are not divided among several ranks are used where they are,
    /// without one.
    pub all_gathers: usize,
    /// All-gathers of a single parameter, for a `val()` outside of the forward of its unit.
    pub single_gathers: usize,
    /// Bytes that this rank has given in the all-gathers of units. Ranks that share a device or host memory
    /// read them where they are.
    pub sent_bytes: usize,
    /// Bytes of full gradients that this rank has given to reductions in its shard group: in the dtypes
    /// of the reduction, or as codes with their scales.
    pub sent_gradient_bytes: usize,
    /// Reductions of a unit's gradients, with those of its replicated parameters: reduce-scatters,
    /// or all-reduces where nothing is sharded.
    pub reduce_scatters: usize,
    /// All-reduces of a unit's gradient shards across the replicas of a hybrid strategy.
    pub all_reduces: usize,
    /// Units that were prefetched but not used next.
    pub mis_prefetches: usize,
    /// Number of times that the rank's thread launched the operations that Burn's `fusion` had
    /// recorded, before a gather buffer was rewritten or buffers of tensors were needed; 0 without
    /// `fusion`.
    pub drains: usize,
    /// Drains that also took the buffers of tensors out of the queue of Burn's `fusion`.
    pub lowerings: usize,
    /// Sums and gathers of activations and their gradients among tensor parallel ranks.
    pub tensor_exchanges: usize,
    /// Gathers of keys and values among context parallel ranks, and sums of their gradients.
    pub context_exchanges: usize,
    /// Gather buffers added because two units that share one were in use at the same time.
    pub added_gather_buffers: usize,
}

/// The running counts behind [`Counts`], and the bytes of gathered parameters.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) all_gathers: AtomicUsize,
    pub(super) single_gathers: AtomicUsize,
    pub(super) sent_bytes: Arc<AtomicUsize>,
    pub(super) sent_gradient_bytes: AtomicUsize,
    pub(super) reduce_scatters: AtomicUsize,
    pub(super) all_reduces: AtomicUsize,
    pub(super) mis_prefetches: AtomicUsize,
    pub(super) drains: AtomicUsize,
    pub(super) lowerings: AtomicUsize,
    pub(super) tensor_exchanges: AtomicUsize,
    pub(super) context_exchanges: AtomicUsize,
    pub(super) added_gather_buffers: AtomicUsize,
    /// Inputs of split layers that could have been compared.
    pub(super) input_checks: AtomicUsize,
    /// Positions of a row that the last `column` layer has gathered under sequence parallel.
    pub(super) sequence_length: AtomicUsize,
    /// Losses that could have been compared.
    pub(super) loss_checks: AtomicUsize,
    /// Backward passes after which whole gradients could have been compared.
    pub(super) whole_gradient_checks: AtomicUsize,
    unsharded_bytes: AtomicUsize,
    peak_unsharded_bytes: AtomicUsize,
}

impl Counters {
    /// Returns the present counts.
    pub(super) fn read(&self) -> Counts {
        let read = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
        Counts {
            all_gathers: read(&self.all_gathers),
            single_gathers: read(&self.single_gathers),
            sent_bytes: read(&self.sent_bytes),
            sent_gradient_bytes: read(&self.sent_gradient_bytes),
            reduce_scatters: read(&self.reduce_scatters),
            all_reduces: read(&self.all_reduces),
            mis_prefetches: read(&self.mis_prefetches),
            drains: read(&self.drains),
            lowerings: read(&self.lowerings),
            tensor_exchanges: read(&self.tensor_exchanges),
            context_exchanges: read(&self.context_exchanges),
            added_gather_buffers: read(&self.added_gather_buffers),
        }
    }

    /// Counts a unit of `bytes` bytes that is being gathered.
    pub(super) fn add_unsharded(&self, bytes: usize) {
        let now = self.unsharded_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak_unsharded_bytes.fetch_max(now, Ordering::Relaxed);
    }

    /// Counts a unit of `bytes` bytes that was resharded.
    pub(super) fn remove_unsharded(&self, bytes: usize) {
        self.unsharded_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Returns the maximum number of bytes of gathered parameters at any time.
    pub(super) fn peak_unsharded_bytes(&self) -> usize {
        self.peak_unsharded_bytes.load(Ordering::Relaxed)
    }
}

/// Adds one to a counter.
pub(super) fn count(counter: &AtomicUsize) {
    counter.fetch_add(1, Ordering::Relaxed);
}
