//! Models as units: what the macros accept, what can be sharded, and how units are called. What the
//! macros refuse is under `ui`.

#[path = "../support/mod.rs"]
mod support;

#[allow(dead_code, reason = "most of it only has to compile")]
pub mod accepted;
mod burn_modules;
mod construction;
mod field_units;
mod hooks;
