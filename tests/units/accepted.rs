//! Correct use of the macros compiles, and the generated code has no warning.

pub mod field_units;
pub mod forwards;
pub mod macro_examples;
pub mod modules;
pub mod values;
pub mod wide;
