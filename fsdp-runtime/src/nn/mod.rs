//! Layers that behave alike on every engine.

pub(crate) mod dropout;
mod philox;

pub use dropout::{Dropout, DropoutConfig};
