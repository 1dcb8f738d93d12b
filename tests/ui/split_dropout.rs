//! Dropout under arguments that are for linear layers.

use burn::module::Module;
use fsdp_runtime::FsdpModule;
use fsdp_runtime::nn::{Dropout, Linear};

#[derive(Module, FsdpModule, Debug)]
pub struct FeedForward {
    #[fsdp(column)]
    up: Linear,
    #[fsdp(column)]
    accepted: Dropout,
    #[fsdp(column, gather)]
    gathered: Dropout,
    #[fsdp(row)]
    down: Dropout,
}

/// Dropout takes no outputs out of a module, and makes none.
#[derive(Module, FsdpModule, Debug)]
pub struct Open {
    #[fsdp(column)]
    up: Linear,
    #[fsdp(column)]
    dropout: Dropout,
}

/// Dropout makes no columns for a layer.
#[derive(Module, FsdpModule, Debug)]
pub struct Alone {
    #[fsdp(column)]
    dropout: Dropout,
    #[fsdp(row)]
    down: Linear,
}

fn main() {}
