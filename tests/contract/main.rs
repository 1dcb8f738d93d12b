//! The contract of PyTorch's FSDP2: a file for each of its `test_fully_shard_*`, under the same
//! name.
//!
//! Checkpoints, mixed precision and offload have tests of their own in `tests/checkpoint` and
//! `tests/training`.

#[path = "../support/mod.rs"]
mod support;

mod autograd;
mod clip_grad_norm;
mod comm;
mod control;
mod forecast;
mod frozen;
mod grad_scaler;
mod ignored_params;
mod init;
mod memory;
mod mlp;
mod overlap;
mod plan;
mod state;
mod training;
