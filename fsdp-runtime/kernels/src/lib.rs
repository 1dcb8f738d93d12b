//! Kernels of [`fsdp-runtime`](https://docs.rs/fsdp-runtime): casts, copies into and out of flat
//! buffers, codes in 8 and 4 bits, means, partial sums of norms, dropout, GELU, SwiGLU, layer norm, RMS
//! norm, rotary positions, softmax, attention, cross-entropy, and the update rules of optimizers.
//!
//! [`Kernels`] is the contract. It has an implementation for Flex, Burn's CPU backend (module `flex`), and
//! one for CubeCL devices (module `cube`). The crate knows nothing of units, ranks or options.
//!
//! Programs use the functions of `fsdp_runtime::kernels`, `nn` and `optim`, which check their
//! arguments. The items of this crate panic on wrong arguments, and may change in any release.
//!
//! `ROOMS`, next to this file, lists the modules in the order in which they may import each other.
#![deny(missing_docs)]

#[cfg(feature = "cube")]
pub mod accesses;
mod adam_rule;
pub mod attention;
pub mod batched_steps;
pub mod codes;
mod contract;
pub mod cross_entropy;
#[cfg(feature = "cube")]
pub mod cube;
#[cfg(feature = "flex")]
pub mod flex;
mod hash;
mod ignore_poison;
mod linear;
mod mask;
mod norm;
mod normalization;
pub mod philox;
pub mod products;
mod random_rounding;
#[cfg(feature = "flex")]
pub mod read_only;
mod rotary;
mod storage_type;
mod support;
mod tensor;
#[cfg_attr(not(feature = "flex"), allow(dead_code, reason = "only Flex runs these loops"))]
mod update_rules;

pub use self::adam_rule::{AdamRule, Decay};
pub use self::attention::{AttentionRule, AttentionTensors, Segments, SplitSegment, WeightPlaces};
pub use self::contract::{AdamTensors, Kernels, RankMean, Sums, cast, takes};
pub use self::cross_entropy::{LossResults, LossRule, LossTensors};
pub use self::hash::mix;
pub use self::ignore_poison::IgnorePoison;
pub use self::linear::LinearActivation;
pub use self::mask::{MaskPart, MaskSource, Places};
pub use self::norm::{InvalidNorm, Norm};
pub use self::normalization::{
    NormalizationGrads, NormalizationRule, NormalizationTensors, Normalized,
};
pub use self::random_rounding::{RandomRounding, RoundedPart};
pub use self::rotary::{RotaryRule, RotaryTensors};
pub use self::storage_type::StorageType;
pub use self::support::{computes, has_kernels};
pub use self::tensor::{Float, Tracked, wide};
pub use self::update_rules::{AdamStep, SgdStep};

/// Copies a tensor's elements to host memory, for unit tests.
#[cfg(all(test, feature = "cpu"))]
fn to_data<B: Kernels>(tensor: Float<B>) -> burn::tensor::TensorData {
    burn::tensor::try_read_sync(B::float_into_data(tensor))
        .expect("the device reads synchronously")
        .expect("the tensor can be read")
}
