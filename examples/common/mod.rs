//! Code that the examples share: memory allocator, devices by name, shared command-line arguments,
//! report format, and the steps of a training loop that do not depend on the model.
//!
//! Each example includes this module with `#[path = "../common/mod.rs"]`.

pub mod allocator;
pub mod args;
pub mod device;
pub mod parse;
pub mod report;
pub mod tokenizers;
pub mod training;
