//! Layers that replace Burn's: dropout that is reproducible on every engine, and a faster GELU and layer
//! normalization.

mod dropout;
mod gelu;
mod layer_norm;

pub use self::dropout::{Dropout, DropoutConfig};
pub use self::gelu::gelu;
pub use self::layer_norm::{LayerNorm, LayerNormConfig};
