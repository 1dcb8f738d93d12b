//! What the macros accept as a unit, which models can be sharded, and how units are called. What
//! the macros refuse is under `tests/ui`.

#[path = "../support/mod.rs"]
mod support;

#[allow(dead_code, clippy::all, reason = "most of it only has to compile, in every form there is")]
pub mod accepted;
mod comparisons;
mod construction;
mod crate_path;
mod field_units;
mod generic_inputs;
mod generic_units;
mod hooked_methods;
mod hooks;
mod list_alias;
mod lora;
mod unit_groups;
