//! What a run did, for a reader: pictures and files of memory over time, and traces.
//!
//! Imports point one way: plot <- memory_file. `trace` stands alone.

pub(crate) mod memory_file;
#[cfg(feature = "plot")]
pub(crate) mod plot;
#[cfg(feature = "trace")]
pub(crate) mod trace;
