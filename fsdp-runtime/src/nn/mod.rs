//! Layers that behave alike on every engine, or cost less than Burn's.

pub(crate) mod dropout;
mod gelu;
pub(crate) mod philox;

pub use dropout::{Dropout, DropoutConfig};
pub use gelu::gelu;
