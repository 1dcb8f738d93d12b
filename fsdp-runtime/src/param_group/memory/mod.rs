//! Accounting of the memory that a sharded model takes on one rank.
//!
//! Imports point one way: usage <- timeline <- tracker.

mod device_usage;
mod timeline;
mod tracker;
mod usage;

pub use self::device_usage::DeviceUsage;
pub use self::timeline::{MemorySample, MemoryTimeline};
pub(crate) use self::tracker::{Counted, MemoryKind, MemoryTracker};
pub use self::usage::{Memory, Usage};
