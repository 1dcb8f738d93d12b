//! The plan of a model: its units and parameters, and where this rank stores each parameter.
//!
//! `found` has the plain results of one traversal of the module, which `inventory` makes. `wrapped_units`,
//! `recomputed_units`, `unknown_types` and `ties` each check one kind of request against the module.
//! `unit_builder` lays out one unit's parameters, and `model` puts everything together.

mod found;
mod inventory;
mod model;
mod recomputed_units;
mod ties;
mod unit_builder;
mod unknown_types;
mod wrapped_units;

pub(crate) use self::found::{IgnoredParam, Key, SHARDED};
pub(crate) use self::model::Plan;
