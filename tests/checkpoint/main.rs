//! Checkpoints, state dicts, and files of pretrained weights and of Burn's records.

#[path = "../support/mod.rs"]
mod support;

mod average;
mod burn_store;
#[cfg(target_os = "linux")]
mod disk_full;
mod filters;
mod ignored;
mod initialisation;
mod load;
mod manager;
mod merge;
mod offload;
mod peft;
mod pretrained;
mod record;
mod resume;
mod running_statistics;
mod state_dict;
mod storage;
mod torch_files;
mod whole_param;
