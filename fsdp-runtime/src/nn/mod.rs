//! Layers and functions that replace Burn's: dropout that is reproducible on every engine; an embedding and the
//! head of a language model, which tensor parallel ranks can split; linear layers, layer norm, RMS norm, rotary
//! positions, softmax, GELU, SwiGLU, attention and the loss of a language model with kernels of their own.
#![cfg_attr(doc, doc = "\n[A page of the guide](crate::guide::layers) is about this module.")]

mod attention;
mod dropout;
mod embedding;
mod gelu;
mod layer_norm;
mod linear;
mod linear_cross_entropy;
mod lm_head;
mod positions;
mod recompute;
mod rms_norm;
mod rotary;
mod softmax;
mod swiglu;

pub use self::attention::{AttentionOptions, attention, attention_bytes};
pub use self::dropout::{Dropout, DropoutConfig};
pub use self::embedding::{Embedding, EmbeddingConfig};
pub use self::gelu::gelu;
pub use self::layer_norm::{LayerNorm, LayerNormConfig};
pub use self::linear::{Linear, LinearActivation, LinearConfig, linear, linear_bytes};
pub use self::linear_cross_entropy::{
    LinearCrossEntropyOptions, WeightLayout, linear_cross_entropy, linear_cross_entropy_bytes,
};
pub use self::lm_head::{LmHead, LmHeadConfig};
pub use self::positions::positions;
pub use self::recompute::recompute;
pub use self::rms_norm::{RmsNorm, RmsNormConfig};
pub use self::rotary::{
    RotaryEncoding, RotaryEncodingConfig, RotaryPairs, RotaryScaling, YarnScaling,
};
pub use self::softmax::softmax;
pub use self::swiglu::{SwiGlu, SwiGluConfig, swiglu};
