//! Kernels of sharded training. Each is implemented for Flex (`flex`) and for CubeCL devices
//! (`cube`).

pub(crate) mod attention;
pub(crate) mod batched_steps;
mod contract;
pub(crate) mod cross_entropy;
#[cfg(feature = "cube")]
pub(super) mod cube;
#[cfg(feature = "flex")]
pub(crate) mod flex;
mod mask;
mod random_rounding;
mod support;
#[cfg_attr(not(feature = "flex"), allow(dead_code, reason = "only Flex runs these loops"))]
mod update_rules;

pub(crate) use self::attention::{AttentionRule, AttentionTensors};
pub use self::contract::Sums;
pub(crate) use self::contract::{AdamTensors, Kernels, RankMean, takes};
pub(crate) use self::cross_entropy::{LossResults, LossRule, LossTensors};
pub use self::mask::MaskSource;
pub(crate) use self::random_rounding::RandomRounding;
pub use self::support::computes;
pub(crate) use self::support::has_kernels;
pub(crate) use self::update_rules::{AdamStep, SgdStep};
