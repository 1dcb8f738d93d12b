//! What is written to files and read from them: checkpoints, state dicts, pretrained weights.

#[path = "../support/mod.rs"]
mod support;

#[cfg(target_os = "linux")]
mod disk_full;
mod ignored;
mod initialisation;
mod load;
mod manager;
mod merge;
mod offload;
mod pretrained;
mod record;
mod resume;
mod running_statistics;
mod state_dict;
mod whole_param;
