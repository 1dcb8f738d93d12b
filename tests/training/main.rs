//! Sharded training gives what unsharded training gives, whatever the options, or a typed error.

#[path = "../support/mod.rs"]
mod support;

mod activation_checkpointing;
mod config;
mod failures;
mod mixed_dtypes;
mod mixed_precision;
mod offload;
mod optim;
mod parity;
mod strategies;
mod whole_param;
