//! What PyTorch's FSDP2 promises in `test_fully_shard_*`, a file for each, kept here under the same
//! names. What is about checkpoints, precision and offload is elsewhere.

#[path = "../support/mod.rs"]
mod support;

mod autograd;
mod clip_grad_norm;
mod comm;
mod forecast;
mod frozen;
mod grad_scaler;
mod ignored_params;
mod init;
mod memory;
mod mlp;
mod overlap;
mod state;
mod training;
