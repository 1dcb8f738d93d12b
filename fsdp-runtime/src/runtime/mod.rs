//! A sharded model at run time: the hooks around a unit's forward, the schedule of collectives, the
//! autodiff operations, and recomputation.
//!
//! Order of the modules, from the bottom up: `values`, `hooks`, `tables`, `forward_panic`, `references`,
//! `field_call`, `recompute`, `autodiff`, `schedule`.

mod autodiff;
pub(crate) mod field_call;
pub(crate) mod forward_panic;
pub(crate) mod hooks;
pub(crate) mod recompute;
pub(crate) mod references;
pub(crate) mod schedule;
pub(crate) mod tables;
mod values;
