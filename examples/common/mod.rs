//! Code that the examples share: memory allocator, devices by name, shared command-line arguments,
//! a note about a configuration file, report format, and the steps of a training loop that do not depend on the model.
//!
//! Each example includes this module with `#[path = "../common/mod.rs"]`.

pub mod allocator;
pub mod args;
#[allow(dead_code, reason = "most examples read the file")]
pub mod config_file;
pub mod device;
#[allow(dead_code, reason = "`mnist` has no log file")]
pub mod log_file;
pub mod parse;
pub mod report;
pub mod tokenizers;
#[allow(dead_code, reason = "`mnist` has no trace")]
pub mod trace;
pub mod training;
