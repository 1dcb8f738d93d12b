//! The table of options: one row for each option of [`FsdpOptions`](super::FsdpOptions).
//!
//! These read the table, so that a row is all they need:
//!
//! | what | where |
//! |---|---|
//! | fields, defaults and documentation of `FsdpOptions`, fingerprints | `fsdp_options.rs` |
//! | fields, defaults, setters and `init` of `FsdpConfig` | `fsdp_config.rs` |
//! | [`TABLE`], for texts: names, defaults, ranges, keys | this file |
//! | keys of Accelerate's file | `config/keys.rs`, `config/section.rs` |
//! | flags of `fsdp launch`, questions of `fsdp config` | the package `fsdp-cli` |
//! | tables of `docs/options.md` | `tests/guide/options.rs` |
//!
//! A row is written as
//!
//! ```text
//! visibility name(builder): kind(type) = default, { columns }
//! ```
//!
//! The attributes of a row are those of the field of `FsdpConfig`: an option that older files lack is
//! under `#[serde(default)]`. The order of the rows is that of saved files and of fingerprints. The
//! kind says how the option is stored:
//!
//! | kind | `FsdpOptions` | `FsdpConfig` |
//! |---|---|---|
//! | `plain(T)` | `T` | `T` |
//! | `by_type(T)` | a `T` for types of units | a `T` for names of types |
//! | `by_path(T)` | a `T` for module paths | the same |
//! | `by_module(T)` | a `T` for types of modules, units or not | a `T` for names of types |
//! | `lists_by_type(UnitType)` | lists of types for types of units | lists of names for names |
//! | `wrap(..)`, `recompute(..)` | a policy with types of units | the same with names of types |
//!
//! The column `keys` has the keys of Accelerate's file, each with the flag of `fsdp launch` and the
//! question of `fsdp config`, or the reason why there are none. `field` is for a key that has the
//! values of its option: it makes a field of `FsdpSection`, which is read, written and converted.
//!
//! Four things are written out elsewhere:
//!
//! - Builder methods (`fsdp_options.rs`, `unit_options.rs`), whose parameters and documentation differ.
//! - `ignored_params`, which is neither saved nor compared across ranks. It is no row of the macro.
//! - Keys with other values than their option: read in `config/read/`, written in `config/write.rs`,
//!   converted in `config/options.rs`.
//! - Keys that set no option, such as `fsdp_state_dict_type`: `config/keys.rs`.

mod row;
#[cfg(test)]
mod tests;

pub use self::row::{FileKey, Keys, OptionRow, Question};
use self::row::{key, switch};

/// Reason why settings of single units have no key.
const ONE_UNIT: Keys = Keys::NotInFile("files of Accelerate have no settings of single units");

/// Hands the rows to the macro `$consumer`.
macro_rules! option_rows {
    ($consumer:ident) => { $consumer! {
    pub(crate) strategy(with_strategy): plain(ShardingStrategy) = ShardingStrategy::FullShard, {
        help: "Sharding strategy, in files by name, such as `FULL_SHARD`",
        default: "[`FullShard`](ShardingStrategy::FullShard)",
        range: "`FullShard`, `ShardGradOp`, `NoShard`, `HybridShard`, `HybridShardZero2`",
        keys: Keys::InFile(&[
            key("fsdp_sharding_strategy", "NAME",
                "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2, or 1 to 5")
                .asked("What is sharded?", "FULL_SHARD", &[
                    ("FULL_SHARD", "parameters, gradients and optimizer state: least memory"),
                    ("SHARD_GRAD_OP", "gradients and optimizer state: fewer all-gathers"),
                    ("NO_SHARD", "nothing: plain data parallel training"),
                    ("HYBRID_SHARD", "as FULL_SHARD, within groups of ranks"),
                    ("HYBRID_SHARD_ZERO2", "as SHARD_GRAD_OP, within groups of ranks"),
                ]),
            key("fsdp_reshard_after_forward", "BOOL", "The strategy of FSDP2: true is FULL_SHARD")
                .same_as("fsdp_sharding_strategy"),
        ]),
    }
    pub(super) shard_size(with_shard_size): plain(Option<usize>) = None, {
        help: "Number of ranks in a shard group",
        default: "the ranks of one machine",
        range: "a divisor of the number of ranks",
        keys: Keys::InFile(&[
            key("parallelism_config_dp_shard_size", "N", "Number of ranks in a shard group"),
            key("parallelism_config_dp_replicate_size", "N", "Number of shard groups"),
        ]),
    }
    #[serde(default = "one")]
    pub(crate) tensor_parallel(with_tensor_parallel): plain(usize) = 1, {
        help: "Number of ranks that have a part of each split matrix",
        default: "1",
        range: "a divisor of the number of ranks",
        keys: Keys::InFile(&[
            key("parallelism_config_tp_size", "N", "Number of tensor parallel ranks"),
        ]),
    }
    #[serde(default)]
    pub(crate) sequence_parallel(with_sequence_parallel): plain(bool) = false, {
        help: "Whether each tensor parallel rank has a part of the positions outside of split layers",
        default: "off",
        range: "on or off",
        keys: Keys::NotInFile("Accelerate has no key for it"),
    }
    #[serde(default = "one")]
    pub(crate) context_parallel(with_context_parallel): plain(usize) = 1, {
        help: "Number of ranks that have a part of each row",
        default: "1",
        range: "a divisor of the number of data parallel ranks",
        keys: Keys::InFile(&[
            key("parallelism_config_cp_size", "N", "Number of context parallel ranks"),
        ]),
    }
    #[serde(default)]
    pub(crate) context_exchange(with_context_exchange):
        plain(ContextExchange) = ContextExchange::Gather, {
        help: "How context parallel ranks exchange keys and values",
        default: "[`Gather`](ContextExchange::Gather)",
        range: "`Gather`, `Ring`",
        keys: Keys::InFile(&[
            key(
                "parallelism_config_cp_comm_strategy",
                "NAME",
                "allgather or alltoall: how context parallel ranks exchange keys and values",
            ),
        ]),
    }
    pub(super) reshard_after_forward(with_reshard_after_forward):
        plain(Option<ReshardAfterForward>) = None, {
        help: "Whether gathered parameters are freed after forward, where `None` leaves it to the strategy",
        default: "that of the strategy",
        range: "`Always`, `Never`, or `To(n)` with a divisor of the ranks that share parameters",
        keys: Keys::NotInFile("`fsdp_reshard_after_forward` chooses the strategy"),
    }
    #[serde(default)]
    pub(crate) reshard_after_forward_for(with_reshard_after_forward_for):
        by_type(ReshardAfterForward) = Vec::new(), {
        help: "Names of unit types that are resharded in another way",
        default: "none",
        range: "types of units, each with a value of `reshard_after_forward`",
        keys: ONE_UNIT,
    }
    #[serde(default)]
    pub(crate) reshard_after_forward_at(with_reshard_after_forward_at):
        by_path(ReshardAfterForward) = Vec::new(), {
        help: "Module paths of units that are resharded in another way",
        default: "none",
        range: "module paths, each with a value of `reshard_after_forward`",
        keys: ONE_UNIT,
    }
    #[serde(default = "on")]
    pub(crate) reshard_after_backward(with_reshard_after_backward): plain(bool) = true, {
        help: "Whether gathered parameters are freed after the backward of a micro-batch",
        default: "on",
        range: "on, off",
        keys: Keys::NotInFile("FSDP2 sets it in the program too"),
    }
    pub(crate) wrap(with_wrap): wrap(WrapPolicy) = WrapPolicy::Annotated, {
        help: "Which annotated units are gathered separately",
        default: "[`Annotated`](WrapPolicy::Annotated)",
        range: "`Annotated`, `TransformerBased(types)`, `Named(names)`, `SizeBased { min_num_params }`, `NoWrap`",
        keys: Keys::InFile(&[
            key("fsdp_auto_wrap_policy", "NAME",
                "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP: which units are gathered on their own")
                .asked("Which annotated units are gathered on their own?", "TRANSFORMER_BASED_WRAP", &[
                    ("TRANSFORMER_BASED_WRAP", "the units you name, or all units"),
                    ("SIZE_BASED_WRAP", "units above a size"),
                    ("NO_WRAP", "none: the model is one unit"),
                ]),
            key("fsdp_transformer_layer_cls_to_wrap", "TYPES", "Units of TRANSFORMER_BASED_WRAP")
                .asked("Their types, such as BertLayer,BertEmbeddings? Empty for all units", "", &[]),
            key("fsdp_min_num_params", "N", "Minimum size of a unit of SIZE_BASED_WRAP")
                .asked("Minimum number of parameters of such a unit?", "100000000", &[]),
        ]),
    }
    pub(super) gather_buffers(with_gather_buffers): plain(usize) = 2, {
        help: "Number of gather buffers of a nesting level",
        default: "2",
        range: "1 or more",
        keys: Keys::NotInFile("`fsdp_limit_all_gathers` has no number"),
    }
    pub(crate) forward_prefetch(with_forward_prefetch): plain(bool) = true, {
        help: "Whether forward gathers the next unit early",
        default: "on",
        range: "on, off",
        keys: Keys::InFile(&[
            key("fsdp_forward_prefetch", "BOOL", "Gather a unit while the unit before it computes")
                .asked("Gather a unit while the unit before it computes, in forward?", "true", &[]),
        ]),
        field: forward_prefetch = "fsdp_forward_prefetch",
    }
    pub(crate) backward_prefetch(with_backward_prefetch):
        plain(BackwardPrefetch) = BackwardPrefetch::Pre, {
        help: "When a unit is gathered for its backward",
        default: "[`Pre`](BackwardPrefetch::Pre)",
        range: "`Pre`, `Post`, `None`",
        keys: Keys::InFile(&[
            key("fsdp_backward_prefetch", "NAME", "BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH, or 1 to 3")
                .asked("When is a unit gathered for its backward?", "BACKWARD_PRE", &[
                    ("BACKWARD_PRE", "before the backward of the following unit: most overlap"),
                    ("BACKWARD_POST", "after the backward of the following unit: one buffer less"),
                    ("NO_PREFETCH", "when its own backward begins"),
                ]),
            key("fsdp_backward_prefetch_policy", "NAME", "Older form of `--fsdp-backward-prefetch`")
                .older_name_of("fsdp_backward_prefetch"),
        ]),
        field: backward_prefetch = "fsdp_backward_prefetch",
    }
    #[serde(default)]
    pub(super) units_ahead(with_units_ahead): plain(Option<usize>) = None, {
        help: "Number of units that are prefetched while one computes, where `None` is 1",
        default: "1",
        range: "0 or more",
        keys: Keys::NotInFile("in Accelerate, the prefetch is of one unit"),
    }
    #[serde(default)]
    pub(crate) forward_prefetch_for(with_forward_prefetch_for):
        lists_by_type(UnitType) = Vec::new(), {
        help: "Names of unit types, each with those to prefetch in forward",
        default: "the next units",
        range: "types of units, each with a list of types",
        keys: ONE_UNIT,
    }
    #[serde(default)]
    pub(crate) backward_prefetch_for(with_backward_prefetch_for):
        lists_by_type(UnitType) = Vec::new(), {
        help: "Names of unit types, each with those to prefetch in backward",
        default: "the next units",
        range: "types of units, each with a list of types",
        keys: ONE_UNIT,
    }
    #[serde(default)]
    pub(crate) forward_prefetch_at(with_forward_prefetch_at): by_path(Vec<String>) = Vec::new(), {
        help: "Module paths of units, each with those to prefetch in forward",
        default: "the next units",
        range: "module paths, each with a list of module paths",
        keys: ONE_UNIT,
    }
    #[serde(default)]
    pub(crate) backward_prefetch_at(with_backward_prefetch_at): by_path(Vec<String>) = Vec::new(), {
        help: "Module paths of units, each with those to prefetch in backward",
        default: "the next units",
        range: "module paths, each with a list of module paths",
        keys: ONE_UNIT,
    }
    #[serde(default)]
    pub(super) gather_in_place(with_gather_in_place): plain(Option<bool>) = None, {
        help: "Whether ranks that are threads on Flex have their shards in one memory, where `None` is the default of the build",
        default: "in release builds",
        range: "on, off",
        keys: Keys::NotInFile("Accelerate has no such option"),
    }
    pub(super) reductions_in_flight(with_reductions_in_flight): plain(Option<usize>) = None, {
        help: "Number of units whose gradients may be in reduction at a time, where `None` is the default of the device",
        default: "1 on Flex, 2 on CUDA, else 5",
        range: "1 or more",
        keys: Keys::NotInFile("Accelerate has no such option"),
    }
    pub(crate) gradient_accumulation(with_gradient_accumulation):
        plain(GradientAccumulation) = GradientAccumulation::ReduceEach, {
        help: "How the gradients of micro-batches are added up",
        default: "[`ReduceEach`](GradientAccumulation::ReduceEach)",
        range: "`ReduceEach`, `ReduceInGroup`, `HoldUnsharded`",
        keys: Keys::NotInFile("in PyTorch, the program calls `no_sync`"),
    }
    #[serde(default)]
    pub(crate) gradient_divide_factor(with_gradient_divide_factor): plain(Option<f64>) = None, {
        help: "Number by which sums of gradients are divided, where `None` is the number of ranks",
        default: "the number of ranks",
        range: "positive and finite",
        keys: Keys::NotInFile("FSDP2 sets it in the program too"),
    }
    pub(super) mixed_precision(with_mixed_precision):
        plain(MixedPrecisionPolicy) = MixedPrecisionPolicy::new(), {
        help: "Dtypes in which units compute and communicate",
        default: "dtypes in which the model is initialised",
        range: "float dtypes that the device supports",
        keys: Keys::InFile(&[
            key("mixed_precision", "no|fp16|bf16", "Dtype of gathered parameters and of the computation")
                .asked("Mixed precision?", "no", &[
                    ("no", "f32 throughout"),
                    ("fp16", "f16 with a loss scale"),
                    ("bf16", "bf16 parameters, f32 state"),
                    ("fp8", "8 bits"),
                ]),
            switch("fp16", "Older form of `--mixed-precision fp16`").same_as("mixed_precision"),
            switch("downcast_bf16", "With bf16, outputs of the model stay in bf16"),
        ]),
    }
    pub(crate) mixed_precision_for(with_mixed_precision_for):
        by_type(MixedPrecisionPolicy) = Vec::new(), {
        help: "Names of unit types with dtypes of their own",
        default: "none",
        range: "types of units, each with a value of `mixed_precision`",
        keys: ONE_UNIT,
    }
    #[serde(default)]
    pub(crate) mixed_precision_at(with_mixed_precision_at):
        by_path(MixedPrecisionPolicy) = Vec::new(), {
        help: "Module paths of units with dtypes of their own",
        default: "none",
        range: "module paths, each with a value of `mixed_precision`",
        keys: ONE_UNIT,
    }
    #[serde(default)]
    pub(super) buffer_dtype(with_buffer_dtype): plain(Option<FloatDType>) = None, {
        help: "Dtype of float tensors in fields that are no parameters, where `None` is the `param_dtype`",
        default: "the dtype that mixed precision sets",
        range: "float dtypes that the device supports",
        keys: Keys::NotInFile("Accelerate sets it to `mixed_precision`, as the default does"),
    }
    #[serde(default)]
    pub(super) buffer_dtype_for(with_buffer_dtype_for): by_module(FloatDType) = Vec::new(), {
        help: "Names of module types whose tensors have another dtype",
        default: "none",
        range: "types of modules, each with a value of `buffer_dtype`",
        keys: ONE_UNIT,
    }
    #[serde(default)]
    pub(crate) buffer_dtype_at(with_buffer_dtype_at): by_path(FloatDType) = Vec::new(), {
        help: "Module paths whose tensors have another dtype",
        default: "none",
        range: "module paths, each with a value of `buffer_dtype`",
        keys: ONE_UNIT,
    }
    #[serde(default)]
    pub(super) storage(with_storage): plain(StoragePolicy) = StoragePolicy::new(), {
        help: "Form in which parameters are stored",
        default: "f32",
        range: "trained: f32, bf16; frozen: f32, bf16, 8 or 4 bits",
        keys: Keys::NotInFile("in Transformers, `BitsAndBytesConfig` sets it"),
    }
    #[serde(default)]
    pub(crate) storage_for(with_storage_for): by_type(StoragePolicy) = Vec::new(), {
        help: "Names of unit types with a form of their own",
        default: "none",
        range: "types of units, each with a value of `storage`",
        keys: ONE_UNIT,
    }
    #[serde(default)]
    pub(crate) storage_at(with_storage_at): by_path(StoragePolicy) = Vec::new(), {
        help: "Module paths with a form of their own",
        default: "none",
        range: "module paths, each with a value of `storage`",
        keys: ONE_UNIT,
    }
    #[serde(default)]
    pub(crate) quantized_gathers(with_quantized_gathers): plain(Option<usize>) = None, {
        help: "Block of all-gathers in 8 bits, if there are any",
        default: "off",
        range: "off, or a power of two from 64 to 4096",
        keys: Keys::NotInFile("DeepSpeed's `zero_quantized_weights`, which Accelerate does not set"),
    }
    #[serde(default)]
    pub(crate) quantized_reductions(with_quantized_reductions): plain(Option<usize>) = None, {
        help: "Block of reductions in 8 bits, if there are any",
        default: "off",
        range: "off, or a power of two from 64 to 4096",
        keys: Keys::NotInFile("DeepSpeed's `zero_quantized_gradients`, which Accelerate does not set"),
    }
    pub(crate) offload(with_offload): plain(OffloadPolicy) = OffloadPolicy::None, {
        help: "State that is stored in host memory",
        default: "[`None`](OffloadPolicy::None)",
        range: "`None`, `Params { pin_memory }`, `OptimizerOnly`",
        keys: Keys::InFile(&[
            key("fsdp_offload_params", "BOOL", "Store parameters and optimizer state in host memory")
                .asked("Offload parameters, gradients and optimizer state to host memory?", "false", &[]),
        ]),
    }
    pub(crate) activation_checkpointing(with_activation_checkpointing):
        recompute(ActivationCheckpointing) = ActivationCheckpointing::Annotated, {
        help: "Which units recompute their forward in backward",
        default: "[`Annotated`](ActivationCheckpointing::Annotated)",
        range: "`None`, `Annotated`, `Units(types)`, `All`",
        keys: Keys::InFile(&[
            key("fsdp_activation_checkpointing", "BOOL", "Recompute activations in backward")
                .asked("Recompute activations in backward, to save memory?", "false", &[]),
        ]),
    }
    pub(crate) offload_activations(with_offload_activations): plain(bool) = false, {
        help: "Whether recomputed units store their inputs in host memory",
        default: "off",
        range: "on, off",
        keys: Keys::InFile(&[
            key("fsdp_activation_checkpointing_offload", "BOOL", "Store inputs of recomputed units in host memory"),
        ]),
    }
    pub(crate) persist_below(with_persist_below): plain(usize) = 0, {
        help: "Number of elements below which a matrix is replicated",
        default: "0",
        range: "0 or more",
        keys: Keys::NotInFile("DeepSpeed's `stage3_param_persistence_threshold`, which Accelerate does not set"),
    }
    pub(crate) sync_module_states(with_sync_module_states): plain(bool) = true, {
        help: "Whether rank 0 broadcasts its weights",
        default: "on",
        range: "on, off",
        keys: Keys::InFile(&[
            key("fsdp_sync_module_states", "BOOL", "Rank 0 broadcasts its initial parameters")
                .asked("Broadcast the weights of rank 0 at the start?", "true", &[]),
        ]),
        field: sync_module_states = "fsdp_sync_module_states",
    }
    pub(crate) cpu_ram_efficient_loading(with_cpu_ram_efficient_loading): plain(bool) = true, {
        help: "Whether only one rank initialises a parameter",
        default: "on",
        range: "on, off",
        keys: Keys::InFile(&[
            key("fsdp_cpu_ram_efficient_loading", "BOOL", "One rank initialises a parameter")
                .asked("Read initial weights on rank 0 only?", "true", &[]),
        ]),
        field: cpu_ram_efficient_loading = "fsdp_cpu_ram_efficient_loading",
    }
    pub(crate) deferred_init(with_deferred_init): plain(bool) = false, {
        help: "Whether no rank initialises parameters",
        default: "off",
        range: "on, off",
        keys: Keys::NotInFile("in PyTorch, the program builds the model on the device `meta`"),
    }
    pub(crate) seed(with_seed): plain(Option<u64>) = None, {
        help: "Seed of initialisation and dropout",
        default: "none",
        range: "any number of 64 bits",
        keys: Keys::NotInFile("in Accelerate, the program calls `set_seed`"),
    }
    pub(crate) optimizer_check(with_optimizer_check): plain(bool) = true, {
        help: "Whether the first steps check the optimizer",
        default: "on",
        range: "on, off",
        keys: Keys::NotInFile("Accelerate has no such check"),
    }
    } };
}
pub(super) use option_rows;

/// Makes [`TABLE`] of the rows, and of `ignored_params`.
macro_rules! table {
    ($(
        $(#[$serde:meta])*
        $vis:vis $name:ident($builder:ident): $kind:ident($ty:ty) = $value:expr, {
            help: $help:literal,
            default: $default:literal,
            range: $range:literal,
            keys: $keys:expr,
            $(field: $field:ident = $key:literal,)?
        }
    )*) => {
        /// The options of [`FsdpOptions`](super::FsdpOptions), in the order of its fields.
        pub const TABLE: &[OptionRow] = &[
            $(OptionRow {
                name: stringify!($name),
                builder: stringify!($builder),
                help: $help,
                default: $default,
                range: $range,
                keys: $keys,
            },)*
            IGNORED_PARAMS,
        ];
    };
}
option_rows!(table);

/// The row of `ignored_params`.
const IGNORED_PARAMS: OptionRow = OptionRow {
    name: "ignored_params",
    builder: "with_ignored_params",
    help: "Parameters that sharding leaves unchanged",
    default: "none",
    range: "ids of parameters",
    keys: Keys::NotInFile("`fsdp_ignored_modules` is an error, since the program names parameters"),
};

impl OptionRow {
    /// Returns the rows of the settings that single units have in place of this one.
    pub fn of_units(&self) -> impl Iterator<Item = &'static Self> {
        let name = self.name;
        let of = move |row: &&Self| matches!(row.name.strip_prefix(name), Some("_for" | "_at"));
        TABLE.iter().filter(of)
    }
}

/// Returns the keys of Accelerate's file that set an option, in the order of the table.
pub fn file_keys() -> impl Iterator<Item = &'static FileKey> {
    TABLE.iter().flat_map(OptionRow::file_keys)
}

/// Returns the key of Accelerate's file with this name, if it sets an option.
pub fn file_key(name: &str) -> Option<&'static FileKey> {
    file_keys().find(|key| key.name == name)
}
