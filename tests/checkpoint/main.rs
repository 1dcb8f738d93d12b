//! Checkpoints, state dicts, and files of pretrained weights and of Burn's records.

#[path = "../support/mod.rs"]
mod support;

mod average;
mod burn_store;
#[cfg(target_os = "linux")]
mod crash;
#[cfg(target_os = "linux")]
mod disk_full;
#[cfg(target_os = "linux")]
mod failed_saves;
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
#[cfg(target_os = "linux")]
mod slow_disk;
mod state_dict;
mod state_options;
mod storage;
mod tied_copies;
mod torch_files;
mod weights_index;
mod whole_param;
