//! Kernels of sharded training as functions of flat Burn tensors: casts, copies into and out of
//! flat buffers, codes in 8 and 4 bits and their elements, means of the ranks' gradients, partial sums
//! of norms, and dropout. Each is one pass over memory.
//!
//! Each kernel has two implementations: a CubeCL kernel for CubeCL devices, and vectorised loops on
//! all threads for Flex, Burn's CPU backend. Results that involve only integers, copies or single
//! roundings have the same bits on both. So have sums and products that are rounded one at a time,
//! on devices whose division and square root round correctly. Sums over many elements
//! ([`norm_sums`], [`unscale`]) are within 1e-5 (relative) of the exact sums.
//!
//! Tensors have shape `[n]` and dtype f32, bf16 or f16, and are on a device that models can be
//! sharded on. Offsets and ranges count elements. The functions check their arguments and return a
//! [`KernelError`]; they do not record autodiff operations. The kernels of optimizers and dropout
//! masks are also used through [`optim`](crate::optim) and [`nn::Dropout`](crate::nn::Dropout).

mod arguments;
mod attention;
mod codes;
mod copies;
mod cross_entropy;
mod dropout;
mod embedding;
mod error;
mod gelu;
mod linear;
mod normalization;
mod recompute;
mod reductions;
mod rotary;
pub(crate) mod saved;
mod softmax;
mod swiglu;
mod two_results;

pub(crate) use self::attention::{
    Arriving, ContextRanks, attention_among, attention_tracked, narrowed, of_part,
};
pub use self::codes::{decode, encode};
pub use self::copies::{cast, pack, unpack};
pub(crate) use self::cross_entropy::{
    ComputedLoss, LossInputs, linear_cross_entropy_tracked, with_gradients,
};
pub use self::dropout::dropout;
pub(crate) use self::dropout::dropout_tracked;
pub(crate) use self::embedding::embedding_tracked;
pub use self::error::KernelError;
pub(crate) use self::gelu::gelu_tracked;
pub(crate) use self::linear::{LinearParams, SharedInput, linear_tracked};
pub(crate) use self::normalization::{NormalizationInputs, normalize_tracked};
pub(crate) use self::recompute::recompute_tracked;
pub use self::reductions::{mean, norm_sums, unscale};
pub(crate) use self::rotary::rotate_tracked;
pub(crate) use self::softmax::softmax_tracked;
pub(crate) use self::swiglu::swiglu_tracked;
pub(crate) use fsdp_kernels::attention::KeyRanges;
pub use fsdp_kernels::products::{allows_tf32, set_tf32};
pub(crate) use fsdp_kernels::{
    AttentionRule, LossRule, MaskPart, NormalizationRule, Places, RotaryRule, Segments,
    WeightPlaces, wide,
};
pub use fsdp_kernels::{MaskSource, Norm, Sums, computes};
