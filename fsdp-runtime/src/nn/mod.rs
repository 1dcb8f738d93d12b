//! Layers that behave alike on every engine, or cost less than Burn's.

pub(crate) mod dropout;
mod gelu;
pub(crate) mod philox;
pub(crate) mod tape;

pub use dropout::{Dropout, DropoutConfig};
pub use gelu::gelu;
