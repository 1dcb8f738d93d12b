//! The values that keys of the file name, under Accelerate's spellings.

use std::fmt;

/// An enumeration that the file spells by name, and in some places by number, counted from 1.
pub(super) trait Named: Copy + 'static {
    /// Every value, in Accelerate's order.
    const ALL: &'static [Self];
    /// Their names, in the same order.
    const NAMES: &'static [&'static str];

    /// The value of this name, in either case.
    fn named(text: &str) -> Option<Self> {
        let position = Self::NAMES.iter().position(|name| name.eq_ignore_ascii_case(text))?;
        Self::ALL.get(position).copied()
    }

    /// The value of this name or number.
    fn named_or_numbered(text: &str) -> Option<Self> {
        match text.parse::<usize>() {
            Ok(number) => Self::ALL.get(number.checked_sub(1)?).copied(),
            Err(_) => Self::named(text),
        }
    }
}

macro_rules! named {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant),+
        }

        impl Named for $name {
            const ALL: &'static [Self] = &[$(Self::$variant),+];
            const NAMES: &'static [&'static str] = &[$($text),+];
        }

        impl $name {
            /// Every value, in Accelerate's order.
            pub const ALL: &'static [Self] = <Self as Named>::ALL;

            /// The value's name in the file.
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
    /// `fsdp_sharding_strategy`: what is sharded between steps.
    ShardingStrategy {
        /// Parameters, gradients and optimizer state (ZeRO stage 3).
        FullShard = "FULL_SHARD",
        /// Gradients and optimizer state; parameters stay gathered from forward to backward (stage 2).
        ShardGradOp = "SHARD_GRAD_OP",
        /// Nothing.
        NoShard = "NO_SHARD",
        /// `FULL_SHARD` within a group of ranks, replicated across groups.
        HybridShard = "HYBRID_SHARD",
        /// `SHARD_GRAD_OP` within a group of ranks, replicated across groups.
        HybridShardZero2 = "HYBRID_SHARD_ZERO2",
    }
}

named! {
    /// `fsdp_auto_wrap_policy`: which of the annotated units are gathered on their own.
    AutoWrapPolicy {
        /// Those that `fsdp_transformer_layer_cls_to_wrap` names; all of them where it names none.
        TransformerBased = "TRANSFORMER_BASED_WRAP",
        /// Those of at least `fsdp_min_num_params` parameters.
        SizeBased = "SIZE_BASED_WRAP",
        /// None: the whole model is one unit.
        NoWrap = "NO_WRAP",
    }
}

named! {
    /// `fsdp_backward_prefetch`: when a unit is gathered for its backward.
    BackwardPrefetch {
        /// Before the backward of the unit after it.
        Pre = "BACKWARD_PRE",
        /// After the backward of the unit after it, before its gradients are reduced.
        Post = "BACKWARD_POST",
        /// When its own backward begins.
        NoPrefetch = "NO_PREFETCH",
    }
}

named! {
    /// `fsdp_state_dict_type`: the form in which a checkpoint is saved.
    StateDictType {
        /// The whole state, collected on rank 0.
        Full = "FULL_STATE_DICT",
        /// Each rank's fragments, for the same layout only.
        Local = "LOCAL_STATE_DICT",
        /// Each rank's fragments with their global shapes, for any layout.
        Sharded = "SHARDED_STATE_DICT",
    }
}

named! {
    /// `mixed_precision`: the type that parameters are gathered and computed in.
    MixedPrecision {
        /// `f32`.
        No = "no",
        /// `f16`, with a loss scale.
        Fp16 = "fp16",
        /// `bf16`.
        Bf16 = "bf16",
        /// 8-bit floats.
        Fp8 = "fp8",
    }
}

/// The one `distributed_type` that this crate implements.
pub(super) const FSDP: &str = "FSDP";

/// The other `distributed_type`s of Accelerate.
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
        for (index, strategy) in ShardingStrategy::ALL.iter().enumerate() {
            let number = (index + 1).to_string();
            assert_eq!(ShardingStrategy::named_or_numbered(&number), Some(*strategy));
            assert_eq!(ShardingStrategy::named_or_numbered(strategy.name()), Some(*strategy));
        }
        assert_eq!(ShardingStrategy::named("full_shard"), Some(ShardingStrategy::FullShard));
        for wrong in ["0", "6", "", "SHARD", "-1"] {
            assert_eq!(ShardingStrategy::named_or_numbered(wrong), None, "{wrong}");
        }
        assert_eq!(MixedPrecision::named("1"), None);
    }
}
