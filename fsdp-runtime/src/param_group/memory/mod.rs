//! Accounting of the memory that a sharded model takes on one rank.

mod device_usage;
mod tracker;
mod usage;

pub use self::device_usage::DeviceUsage;
pub(crate) use self::tracker::{Counted, MemoryKind, MemoryTracker};
pub use self::usage::{Memory, Usage};
