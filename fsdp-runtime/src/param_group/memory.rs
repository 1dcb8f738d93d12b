//! What a sharded model holds in memory, counted as it is taken and given back.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use burn::tensor::Device;

/// Bytes of one kind on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Placement at present.
    pub now: usize,
    /// The most held at once since the model was sharded.
    pub peak: usize,
}

/// What one rank holds of a sharded model, by kind. Activations other than the inputs of checkpointed
/// units are Burn's, and not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Shards of sharded parameters.
    pub shards: Usage,
    /// Parameters that every rank holds whole; where they rest on the host, copies for the units that
    /// are unsharded.
    pub replicated: Usage,
    /// The buffers that parameters are gathered in, and what was cast or copied to the device to be
    /// sent there.
    pub gathered: Usage,
    /// Gradients: full ones until they are reduced, and reduced ones from then until the next
    /// forward; where they rest on the host, until they are there.
    pub gradients: Usage,
    /// The inputs that checkpointed units keep until backward.
    pub activations: Usage,
    /// The optimizer's state, as [`Fsdp::record_optimizer`](crate::Fsdp::record_optimizer) found it.
    pub optimizer: Usage,
    /// All of these together.
    pub total: Usage,
}

impl Memory {
    /// Every kind with its name, the total last.
    pub const fn kinds(&self) -> [(&'static str, Usage); 7] {
        [
            ("shards", self.shards),
            ("replicated", self.replicated),
            ("gathered", self.gathered),
            ("gradients", self.gradients),
            ("activations", self.activations),
            ("optimizer", self.optimizer),
            ("total", self.total),
        ]
    }
}

impl fmt::Display for Memory {
    /// A table in MiB.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        write!(f, "{:<12}{:>12}{:>12}", "MiB a rank", "now", "peak")?;
        for (name, usage) in self.kinds() {
            write!(f, "\n{name:<12}{:>12.2}{:>12.2}", mib(usage.now), mib(usage.peak))?;
        }
        Ok(())
    }
}

/// Bytes that Burn's allocator has on a device, for all that this process does there: what
/// `torch.cuda.memory_allocated` and `memory_reserved` tell, where [`Memory`] tells what a model holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceUsage {
    /// Those of tensors.
    pub in_use: usize,
    /// Those taken from the device, for tensors to come as well.
    pub reserved: usize,
}

impl DeviceUsage {
    /// That of a CubeCL device; `None` for Flex, whose tensors are the process's own memory.
    pub fn of(device: &Device) -> Option<Self> {
        match device.clone().inner().as_dispatch() {
            #[cfg(feature = "cube")]
            burn::backend::DispatchDevice::Cube(device) => {
                use cubecl::MemoryScope;
                let usage = device.client().memory_report(MemoryScope::Device).usage();
                let bytes = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
                Some(Self {
                    in_use: bytes(usage.bytes_in_use),
                    reserved: bytes(usage.bytes_reserved),
                })
            }
            #[allow(unreachable_patterns, reason = "without a CubeCL device there is no other")]
            _ => None,
        }
    }
}

/// A kind of [`Memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    Shards,
    Replicated,
    /// Copies of the same on the device, of units that are unsharded.
    Copied,
    /// Copies of shards that the device keeps for backward.
    Sent,
    Gathered,
    /// Shards in the type and on the device that they are sent in and from.
    Sending,
    /// Full gradients.
    Gradients,
    /// The results of a reduction under way, on the device.
    Reducing,
    /// Reduced gradients.
    Reduced,
    Activations,
    /// The same in the host's memory.
    Stowed,
    Optimizer,
}

/// The running counts of the device and of the host.
#[derive(Debug, Default)]
pub(crate) struct MemoryTracker {
    device: Mutex<Memory>,
    host: Mutex<Memory>,
    /// What rests between uses is on the host.
    offloaded: bool,
}

fn lock(memory: &Mutex<Memory>) -> MutexGuard<'_, Memory> {
    memory.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Bytes counted until it is dropped.
#[derive(Debug)]
pub(crate) struct Counted {
    tracker: Arc<MemoryTracker>,
    kind: MemoryKind,
    bytes: usize,
}

impl Counted {
    pub(crate) fn new(tracker: &Arc<MemoryTracker>, kind: MemoryKind, bytes: usize) -> Self {
        tracker.take(kind, bytes);
        Self { tracker: tracker.clone(), kind, bytes }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.tracker.give_back(self.kind, self.bytes);
    }
}

impl MemoryTracker {
    /// Empty counts; `offloaded` says that what rests between uses is on the host.
    pub(crate) fn new(offloaded: bool) -> Self {
        Self { offloaded, ..Self::default() }
    }

    /// The count of the device as it stands.
    pub(crate) fn device(&self) -> Memory {
        *lock(&self.device)
    }

    /// The count of what rests in the host's memory.
    pub(crate) fn host(&self) -> Memory {
        *lock(&self.host)
    }

    /// `bytes` more.
    pub(crate) fn take(&self, kind: MemoryKind, bytes: usize) {
        self.change(kind, |now| now + bytes);
    }

    /// `bytes` less.
    pub(crate) fn give_back(&self, kind: MemoryKind, bytes: usize) {
        self.change(kind, |now| now.saturating_sub(bytes));
    }

    /// `bytes` in all.
    pub(crate) fn set(&self, kind: MemoryKind, bytes: usize) {
        self.change(kind, |_| bytes);
    }

    fn change(&self, kind: MemoryKind, change: impl FnOnce(usize) -> usize) {
        let rests = !matches!(
            kind,
            MemoryKind::Copied
                | MemoryKind::Sent
                | MemoryKind::Gathered
                | MemoryKind::Sending
                | MemoryKind::Gradients
                | MemoryKind::Reducing
                | MemoryKind::Activations
        );
        let on_host = kind == MemoryKind::Stowed || self.offloaded && rests;
        let mut memory = lock(if on_host { &self.host } else { &self.device });
        let usage = match kind {
            MemoryKind::Shards | MemoryKind::Sent => &mut memory.shards,
            MemoryKind::Replicated | MemoryKind::Copied => &mut memory.replicated,
            MemoryKind::Gathered | MemoryKind::Sending => &mut memory.gathered,
            MemoryKind::Gradients | MemoryKind::Reducing | MemoryKind::Reduced => {
                &mut memory.gradients
            }
            MemoryKind::Activations | MemoryKind::Stowed => &mut memory.activations,
            MemoryKind::Optimizer => &mut memory.optimizer,
        };
        usage.now = change(usage.now);
        usage.peak = usage.peak.max(usage.now);
        let [kinds @ .., (_, total)] = memory.kinds();
        let now = kinds.iter().map(|(_, usage)| usage.now).sum();
        memory.total = Usage { now, peak: total.peak.max(now) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_of_the_total_is_of_one_moment() {
        let tracker = MemoryTracker::default();
        tracker.take(MemoryKind::Gathered, 10);
        tracker.give_back(MemoryKind::Gathered, 10);
        tracker.take(MemoryKind::Gradients, 7);
        let memory = tracker.device();
        assert_eq!(memory.gathered, Usage { now: 0, peak: 10 });
        assert_eq!(memory.total, Usage { now: 7, peak: 10 });
        tracker.set(MemoryKind::Optimizer, 20);
        assert_eq!(tracker.device().total, Usage { now: 27, peak: 27 });
        assert!(tracker.device().to_string().contains("gradients"));
        assert_eq!(tracker.host(), Memory::default());
    }

    #[test]
    fn what_rests_is_counted_where_it_rests() {
        let tracker = MemoryTracker::new(true);
        for kind in
            [MemoryKind::Shards, MemoryKind::Replicated, MemoryKind::Reduced, MemoryKind::Optimizer]
        {
            tracker.take(kind, 1);
        }
        for kind in
            [MemoryKind::Copied, MemoryKind::Sent, MemoryKind::Gathered, MemoryKind::Gradients]
        {
            tracker.take(kind, 100);
        }
        assert_eq!((tracker.host().total.now, tracker.device().total.now), (4, 400));
        let tracker = MemoryTracker::new(false);
        tracker.take(MemoryKind::Stowed, 5);
        assert_eq!((tracker.host().activations.now, tracker.device().total.now), (5, 0));
    }

    #[test]
    fn what_is_dropped_is_given_back() {
        let tracker = Arc::new(MemoryTracker::default());
        let kept = [3, 4].map(|bytes| Counted::new(&tracker, MemoryKind::Activations, bytes));
        assert_eq!(tracker.device().activations, Usage { now: 7, peak: 7 });
        drop(kept);
        assert_eq!(tracker.device().activations, Usage { now: 0, peak: 7 });
    }

    #[cfg(all(feature = "cpu", feature = "flex"))]
    #[test]
    fn a_devices_allocator_tells_what_it_has() {
        let device = Device::cpu();
        let tensor = burn::tensor::Tensor::<1>::zeros([1 << 20], &device);
        device.sync().unwrap();
        let DeviceUsage { in_use, reserved } = DeviceUsage::of(&device).expect("a CubeCL device");
        assert!(in_use >= 4 << 20 && reserved >= in_use, "{in_use} {reserved}");
        drop(tensor);
        assert_eq!(DeviceUsage::of(&Device::flex()), None);
    }
}
