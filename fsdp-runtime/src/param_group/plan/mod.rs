//! The plan of a model: its units and parameters, and where this rank stores each parameter.
//!
//! `inventory` traverses the module once and records what it finds in the types of `found`.
//! `wrapped_units`, `recomputed_units`, `unknown_types` and `ties` check the options and the ties
//! against the module. `unit_builder` lays out the parameters of one unit, and `model` puts
//! everything together. `shape` lays out units from names and shapes, without a module.

mod found;
mod groups;
mod inventory;
mod model;
mod prefetch_lists;
mod recomputed_units;
pub(crate) mod shape;
mod ties;
mod unit_builder;
mod unknown_types;
mod wrapped_units;

pub(crate) use self::found::{IgnoredParam, Key, SHARDED};
pub(crate) use self::model::ModelPlan;
pub(crate) use self::unit_builder::gathers;
