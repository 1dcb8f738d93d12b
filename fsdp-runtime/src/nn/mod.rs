//! Layers that replace Burn's: dropout that is reproducible on every engine, and a faster GELU.

mod dropout;
mod gelu;

pub use self::dropout::{Dropout, DropoutConfig};
pub use self::gelu::gelu;
