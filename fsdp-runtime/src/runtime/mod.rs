//! A sharded model at run time: the hooks around a unit's forward, the schedule of collectives, the
//! autodiff operations, and recomputation.

pub(crate) mod autodiff;
pub(crate) mod field_call;
pub(crate) mod hooks;
pub(crate) mod recompute;
pub(crate) mod schedule;
pub(crate) mod state;
