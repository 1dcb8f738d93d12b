//! Layers and functions that replace Burn's: dropout that is reproducible on every engine, and layer
//! normalization, softmax and GELU with kernels of their own.

mod dropout;
mod gelu;
mod layer_norm;
mod softmax;

pub use self::dropout::{Dropout, DropoutConfig};
pub use self::gelu::gelu;
pub use self::layer_norm::{LayerNorm, LayerNormConfig};
pub use self::softmax::softmax;
