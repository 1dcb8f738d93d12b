//! The memory that a rank will need for a model, before sharding or initialising it.

mod buffers;
mod gradients;
mod memory_forecast;

pub use self::memory_forecast::{HostForecast, MemoryError, MemoryForecast};
