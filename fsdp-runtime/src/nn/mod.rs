//! Layers that behave alike on every engine, or cost less than Burn's.

mod dropout;
mod gelu;

pub use dropout::{Dropout, DropoutConfig};
pub use gelu::gelu;
