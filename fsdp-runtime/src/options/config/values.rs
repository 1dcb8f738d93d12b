//! Values of keys that Accelerate spells as names.

use std::fmt;

use burn::tensor::FloatDType;

use crate::options::{BackwardPrefetch, ContextExchange, ShardingStrategy};

/// An enumeration whose values have names in the file. Some keys also take a number, counted from
/// 1.
pub(super) trait Named: Copy + PartialEq + 'static {
    /// All values, in Accelerate's order.
    const VALUES: &'static [Self];
    /// Names of the values, in the order of [`VALUES`](Self::VALUES).
    const NAMES: &'static [&'static str];

    /// Returns the value with this name. Upper and lower case are equal.
    fn named(text: &str) -> Option<Self> {
        let position = Self::NAMES.iter().position(|name| name.eq_ignore_ascii_case(text))?;
        Self::VALUES.get(position).copied()
    }

    /// Returns the value with this name or number.
    fn named_or_numbered(text: &str) -> Option<Self> {
        match text.parse::<usize>() {
            Ok(number) => Self::VALUES.get(number.checked_sub(1)?).copied(),
            Err(_) => Self::named(text),
        }
    }

    /// Returns the name of the value in the file.
    fn name_in_file(self) -> &'static str {
        let position = Self::VALUES.iter().position(|value| *value == self);
        position.and_then(|position| Self::NAMES.get(position)).copied().unwrap_or_default()
    }
}

impl Named for ShardingStrategy {
    const VALUES: &'static [Self] = &[
        Self::FullShard,
        Self::ShardGradOp,
        Self::NoShard,
        Self::HybridShard,
        Self::HybridShardZero2,
    ];
    const NAMES: &'static [&'static str] =
        &["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"];
}

impl Named for BackwardPrefetch {
    const VALUES: &'static [Self] = &[Self::Pre, Self::Post, Self::None];
    const NAMES: &'static [&'static str] = &["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"];
}

impl Named for ContextExchange {
    const VALUES: &'static [Self] = &[Self::Gather, Self::Ring];
    const NAMES: &'static [&'static str] = &["allgather", "alltoall"];
}

macro_rules! named {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant),+
        }

        impl Named for $name {
            const VALUES: &'static [Self] = &[$(Self::$variant),+];
            const NAMES: &'static [&'static str] = &[$($text),+];
        }

        impl $name {
            /// All values, in Accelerate's order.
            pub const ALL: &'static [Self] = <Self as Named>::VALUES;

            /// Returns the name of the value in the file.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text),+
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

named! {
    /// `fsdp_auto_wrap_policy`: which annotated units are gathered on their own.
    AutoWrapPolicy {
        /// The units that `fsdp_transformer_layer_cls_to_wrap` names, or all units if it names
        /// none.
        TransformerBased = "TRANSFORMER_BASED_WRAP",
        /// The units with at least `fsdp_min_num_params` parameters.
        SizeBased = "SIZE_BASED_WRAP",
        /// No unit: the whole model is one unit.
        NoWrap = "NO_WRAP",
    }
}

named! {
    /// `fsdp_state_dict_type`: the form in which a checkpoint is saved.
    StateDictType {
        /// The whole state, collected on rank 0.
        Full = "FULL_STATE_DICT",
        /// The shards of each rank, which only a run with an equal layout can load.
        Local = "LOCAL_STATE_DICT",
        /// The shards of each rank with their global shapes, which a run with any layout can load.
        Sharded = "SHARDED_STATE_DICT",
    }
}

named! {
    /// `mixed_precision`: the dtype in which parameters are gathered and the model computes.
    MixedPrecision {
        /// No mixed precision: f32.
        No = "no",
        /// Mixed precision in f16. The program needs a `GradScaler`.
        Fp16 = "fp16",
        /// Mixed precision in bf16.
        Bf16 = "bf16",
        /// 8-bit floats, which the runtime does not support.
        Fp8 = "fp8",
    }
}

impl MixedPrecision {
    /// Returns the dtype of gathered parameters; `None` for 8-bit floats, which are not supported.
    pub const fn param_dtype(self) -> Option<FloatDType> {
        match self {
            Self::No => Some(FloatDType::F32),
            Self::Fp16 => Some(FloatDType::F16),
            Self::Bf16 => Some(FloatDType::BF16),
            Self::Fp8 => None,
        }
    }
}

/// Parses a Boolean of YAML 1.1, or a text that Python's `strtobool` takes.
pub(super) fn boolean(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" | "y" | "t" | "1" => Some(true),
        "false" | "no" | "off" | "n" | "f" | "0" => Some(false),
        _ => None,
    }
}

/// The `distributed_type` that this crate implements.
pub(super) const FSDP: &str = "FSDP";

/// All other values of `distributed_type` in Accelerate.
pub(super) const OTHER_DISTRIBUTED_TYPES: &[&str] = &[
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "MULTI_HPU",
    "DEEPSPEED",
    "XLA",
    "MEGATRON_LM",
    "TP",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_known_by_name_and_number() {
        for (strategy, name) in ShardingStrategy::ALL {
            let number = strategy.number().to_string();
            assert_eq!(ShardingStrategy::named_or_numbered(&number), Some(strategy));
            assert_eq!(ShardingStrategy::named_or_numbered(name), Some(strategy));
            assert_eq!(strategy.name_in_file(), name);
        }
        assert_eq!(ShardingStrategy::named("full_shard"), Some(ShardingStrategy::FullShard));
        for wrong in ["0", "6", "", "SHARD", "-1"] {
            assert_eq!(ShardingStrategy::named_or_numbered(wrong), None, "{wrong}");
        }
        assert_eq!(MixedPrecision::named("1"), None);
    }
}
