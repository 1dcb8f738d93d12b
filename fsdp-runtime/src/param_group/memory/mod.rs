//! Accounting of the memory that a sharded model takes on one rank.
//!
//! Imports point one way: memory_forecast, optimizer_states; usage, holders <- timeline <- recorder <- tracker <- handle.

mod device_usage;
mod handle;
mod holders;
mod memory_forecast;
mod optimizer_states;
mod recorder;
mod timeline;
mod tracker;
mod usage;

pub use self::device_usage::DeviceUsage;
pub(crate) use self::handle::MemoryHandle;
pub use self::holders::MemoryHolder;
pub use self::memory_forecast::{HostForecast, MemoryError, MemoryForecast};
pub(crate) use self::optimizer_states::{OptimizerStates, StateSize, report, reported};
pub use self::timeline::{MemoryEvent, MemoryMark, MemoryPeak, MemorySample, MemoryTimeline};
pub(crate) use self::tracker::{Counted, MemoryKind, MemoryTracker};
pub use self::usage::{Memory, Usage};
