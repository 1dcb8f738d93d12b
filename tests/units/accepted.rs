//! Right use compiles, without a warning in what is generated.

pub mod field_units;
pub mod forwards;
pub mod macro_examples;
pub mod modules;
pub mod values;
pub mod wide;
