//! The options of [`fully_shard`](crate::fully_shard), and their builder methods. Fields and defaults
//! are those of the rows in `table.rs`.

use std::fmt::Debug;

use burn::module::ParamId;
use burn::tensor::FloatDType;

use super::policies::{
    ActivationCheckpointing, BackwardPrefetch, ContextExchange, GradientAccumulation,
    OffloadPolicy, ReshardAfterForward, ShardingStrategy, WrapPolicy,
};
use super::precision::MixedPrecisionPolicy;
use super::storage::StoragePolicy;
use super::table::option_rows;
use crate::module::UnitType;

/// Returns the type of a field, by the kind of its row.
macro_rules! field_type {
    (by_type($ty:ty)) => { Vec<(UnitType, $ty)> };
    (by_module($ty:ty)) => { Vec<(UnitType, $ty)> };
    (by_path($ty:ty)) => { Vec<(String, $ty)> };
    (lists_by_type($ty:ty)) => { Vec<($ty, Vec<$ty>)> };
    ($kind:ident($ty:ty)) => { $ty };
}

/// Makes [`FsdpOptions`] of the rows of the table. `ignored_params` is no row: ids of parameters
/// differ between processes, so they are neither saved nor compared.
macro_rules! fsdp_options {
    ($(
        $(#[$serde:meta])*
        $vis:vis $name:ident($builder:ident): $kind:ident($ty:ty) = $value:expr, {
            help: $help:literal,
            default: $default:literal,
            range: $range:literal,
            $($rest:tt)*
        }
    )*) => {
        /// The options of [`fully_shard`](crate::fully_shard). Every rank must pass the same ones.
        ///
        /// | option | default | values |
        /// |---|---|---|
        $(#[doc = concat!(
            "| [`", stringify!($name), "`](Self::", stringify!($builder), ") | ", $default, " | ",
            $range, " |"
        )])*
        /// | [`ignored_params`](Self::with_ignored_params) | none | ids of parameters |
        #[derive(Clone, Debug, PartialEq)]
        #[must_use]
        pub struct FsdpOptions {
            $($vis $name: field_type!($kind($ty)),)*
            pub(crate) ignored_params: Vec<ParamId>,
        }

        impl FsdpOptions {
            /// Returns the default options: `FULL_SHARD` with two gather buffers and prefetch in both
            /// directions, starting from rank 0's weights.
            pub const fn new() -> Self {
                Self { $($name: $value,)* ignored_params: Vec::new() }
            }

            /// Returns the names and values of the options that must be equal on all ranks.
            pub(super) fn compared(&self) -> Vec<(&'static str, &dyn Debug)> {
                vec![$((stringify!($name), &self.$name),)*]
            }
        }
    };
}
option_rows!(fsdp_options);

impl Default for FsdpOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl FsdpOptions {
    /// Sets what is sharded between steps. Default: [`ShardingStrategy::FullShard`].
    ///
    /// PyTorch's `sharding_strategy`, Accelerate's `fsdp_sharding_strategy`.
    pub const fn with_strategy(mut self, strategy: ShardingStrategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// Sets how many ranks share one copy of the parameters under `HYBRID_SHARD` and
    /// `HYBRID_SHARD_ZERO2`. It must divide the world size. Default: the number of ranks on one
    /// machine.
    ///
    /// The other strategies ignore this option. In PyTorch it is the shard dimension of the device
    /// mesh, in Accelerate `dp_shard_size`.
    pub const fn with_shard_size(mut self, ranks: usize) -> Self {
        self.shard_size = Some(ranks);
        self
    }

    /// Sets how many ranks have a part of each matrix under `#[fsdp(column)]` and `#[fsdp(row)]`. It must
    /// divide the number of ranks, and the sizes along which the matrices are split. Neighbours among all
    /// ranks form a group, and each group is one data parallel rank: its members take the same batches.
    /// Default: 1, nothing is split.
    ///
    /// PyTorch's `parallelize_module`, Accelerate's `parallelism_config_tp_size`.
    pub const fn with_tensor_parallel(mut self, ranks: usize) -> Self {
        self.tensor_parallel = ranks;
        self
    }

    /// Sets whether each tensor parallel rank has a part of the positions outside of split layers: in norms,
    /// residuals, and the inputs that units keep for recomputation. Default: off. It has no effect without
    /// [tensor parallel](Self::with_tensor_parallel) ranks.
    ///
    /// A `column` layer then gathers the positions of its input, and a `row` layer, or an embedding under `vocab`,
    /// returns this rank's positions of its sum: a reduce-scatter and an all-gather in place of an all-reduce. The
    /// number of positions of a row is that of a `column` layer's *output*. The gradients of whole parameters are
    /// added over the ranks. Head and embedding are split by `vocab`, and the number of positions is a multiple of
    /// the number of tensor parallel ranks.
    ///
    /// PyTorch's `SequenceParallel`, Megatron's `--sequence-parallel`.
    pub const fn with_sequence_parallel(mut self, on: bool) -> Self {
        self.sequence_parallel = on;
        self
    }

    /// Sets how many ranks have a part of each row, for rows that are too long for one rank. It must divide the
    /// number of data parallel ranks, of which neighbours form a group. Default: 1, each rank has whole rows.
    ///
    /// The ranks of a group take the same rows, and each passes its positions to the model:
    /// [`Mesh::context_part`](crate::Mesh::context_part) cuts a batch. In the forward of a unit,
    /// [`nn::attention`](crate::nn::attention()) then sees the keys of whole rows, and
    /// [`nn::RotaryEncoding`](crate::nn::RotaryEncoding) knows the positions. For parameters the ranks of a group
    /// are data parallel ranks: each stores a shard of its own. Losses that are means over tokens need
    /// [`backward_sum`](crate::Fsdp::backward_sum) where parts differ in the number of counted tokens.
    ///
    /// PyTorch's `context_parallel`, Accelerate's `parallelism_config_cp_size`.
    pub const fn with_context_parallel(mut self, ranks: usize) -> Self {
        self.context_parallel = ranks;
        self
    }

    /// Sets how [context parallel](Self::with_context_parallel) ranks exchange the keys and values of attention.
    /// Default: [`ContextExchange::Gather`].
    ///
    /// PyTorch's `set_rotate_method`, Accelerate's `parallelism_config_cp_comm_strategy`.
    pub const fn with_context_exchange(mut self, exchange: ContextExchange) -> Self {
        self.context_exchange = exchange;
        self
    }

    /// Sets whether gathered parameters are freed between forward and backward. Default:
    /// [`Always`](ReshardAfterForward::Always) under `FULL_SHARD` and `HYBRID_SHARD`,
    /// [`Never`](ReshardAfterForward::Never) under the other strategies.
    ///
    /// PyTorch's `reshard_after_forward`, Accelerate's `fsdp_reshard_after_forward`.
    pub const fn with_reshard_after_forward(mut self, reshard: ReshardAfterForward) -> Self {
        self.reshard_after_forward = Some(reshard);
        self
    }

    /// Sets which of the annotated units are gathered separately. Default:
    /// [`WrapPolicy::Annotated`].
    ///
    /// PyTorch's `auto_wrap_policy`, Accelerate's `fsdp_auto_wrap_policy`.
    pub const fn with_wrap(mut self, wrap: WrapPolicy) -> Self {
        self.wrap = wrap;
        self
    }

    /// Sets how many gather buffers the units of one nesting level share, at least 1. Default: 2.
    ///
    /// With two buffers, one holds the unit that computes and the other the unit that is
    /// prefetched. With one buffer, nothing is prefetched. Each buffer takes as many bytes as the
    /// largest unit that is gathered into it. The outermost unit has one buffer in any case. There
    /// are more where [`units_ahead`](Self::with_units_ahead) or a list of units to prefetch needs
    /// them.
    pub const fn with_gather_buffers(mut self, buffers: usize) -> Self {
        self.gather_buffers = buffers;
        self
    }

    /// Sets whether forward gathers the next unit while the present one computes. Default: on.
    ///
    /// The second unit occupies a second gather buffer. PyTorch's `forward_prefetch`, Accelerate's
    /// `fsdp_forward_prefetch` (off by default in both).
    pub const fn with_forward_prefetch(mut self, prefetch: bool) -> Self {
        self.forward_prefetch = prefetch;
        self
    }

    /// Sets when a unit is gathered for its backward. Default: [`BackwardPrefetch::Pre`].
    ///
    /// PyTorch's `backward_prefetch`, Accelerate's `fsdp_backward_prefetch`.
    pub const fn with_backward_prefetch(mut self, prefetch: BackwardPrefetch) -> Self {
        self.backward_prefetch = prefetch;
        self
    }

    /// Sets whether ranks that are threads of one process on Flex have their shards in one memory. Default:
    /// in release builds.
    ///
    /// The shards of all ranks then lie side by side, as a gather buffer would have them, and each rank
    /// reads the parameters of a unit there, without a gather buffer and without a copy. This holds for units
    /// that are stored in the dtype that computes, and without an offload policy; other units and devices
    /// are gathered. A new shard goes back to that memory unless something refers to the one before: a
    /// clone of the model, the graph of an earlier forward, or an average of weights. Passes copy the unit to
    /// gather buffers as long as the shard of some rank lies elsewhere.
    ///
    /// In debug builds a resharded unit has the value NaN, so that a parameter that is read outside of its
    /// unit's forward and backward shows. Losses are equal either way. A backward whose parameters have
    /// changed since its forward uses the values of the forward here; a unit that is gathered again has
    /// the new ones.
    pub const fn with_gather_in_place(mut self, in_place: bool) -> Self {
        self.gather_in_place = Some(in_place);
        self
    }

    /// Sets how many units' gradients may be in reduction at a time, at least 1. Default: 1 on
    /// Flex, 2 on CUDA devices, 5 on other devices.
    ///
    /// With 1, backward waits for the reduction of a unit before the gradients of the next one
    /// arrive, so that the full gradients of one unit exist at a time. With 2, backward continues
    /// during the reduction, so a device that computes asynchronously always has work. Each further
    /// reduction takes the full and the reduced gradients of one more unit. PyTorch's FSDP2 works
    /// as with 2.
    ///
    /// Ranks that are threads on one CubeCL device reduce a unit's gradients once all of them have
    /// come to it. A rank that is ahead of the others blocks when as many reductions wait as this
    /// number says. Devices other than CUDA and Flex have only such ranks or one rank a process, so
    /// their default is larger. Several ranks on one GPU may set 5 as well.
    pub const fn with_reductions_in_flight(mut self, reductions: usize) -> Self {
        self.reductions_in_flight = Some(reductions);
        self
    }

    /// Sets how [`Fsdp::accumulate`](crate::Fsdp::accumulate) stores the gradients of a
    /// micro-batch. Default: [`GradientAccumulation::ReduceEach`].
    ///
    /// [`HoldUnsharded`](GradientAccumulation::HoldUnsharded) is PyTorch's `no_sync`.
    pub const fn with_gradient_accumulation(mut self, accumulation: GradientAccumulation) -> Self {
        self.gradient_accumulation = accumulation;
        self
    }

    /// Sets the number by which the sum of all ranks' gradients is divided. Default: the number of
    /// ranks, so that gradients are means.
    ///
    /// With 1, gradients are sums. The number must be positive and finite. It has no effect on gradients of
    /// [`Fsdp::backward_sum`](crate::Fsdp::backward_sum). FSDP2's `set_gradient_divide_factor`;
    /// [`Fsdp::set_gradient_divide_factor`](crate::Fsdp::set_gradient_divide_factor) changes it later.
    pub const fn with_gradient_divide_factor(mut self, factor: f64) -> Self {
        self.gradient_divide_factor = Some(factor);
        self
    }

    /// Sets the dtypes in which units compute and communicate. Default: the dtypes in which the
    /// model is initialised, usually f32.
    ///
    /// PyTorch's `mixed_precision` or `mp_policy`. Accelerate's `mixed_precision` sets the dtype of
    /// parameters.
    pub const fn with_mixed_precision(mut self, policy: MixedPrecisionPolicy) -> Self {
        self.mixed_precision = policy;
        self
    }

    /// Sets the dtype that *tables* have inside of a forward: float tensors in fields that are neither
    /// parameters nor running statistics, such as masks, the sinusoids of `PositionalEncoding` and the
    /// weights of `CrossEntropyLoss`. Default: the
    /// [`param_dtype`](MixedPrecisionPolicy::with_param_dtype) of the table's unit; without one, tables
    /// keep their dtype.
    ///
    /// The outermost forward of a model runs on a clone of the module with cast tables, which shares the
    /// parameters, and makes it anew each time. Outside of a forward, and in all that is saved, tables
    /// have their own dtype. Tables in an argument that is a reference to a module, such as
    /// `tables: &Tables`, are cast in a copy too, to the dtype of the called unit. Integers and Booleans
    /// are never cast, nor are tensors in fields under `#[fsdp(leaf)]` or `#[module(skip)]`.
    ///
    /// The table of `RotaryEncoding` keeps its dtype, since Burn computes this encoding in the device's
    /// default dtype: cast its input and its output,
    /// `rope.forward(x.clone().cast(DType::F32)).cast(x.dtype())`. Only
    /// [`buffer_dtype_for`](Self::with_buffer_dtype_for) and
    /// [`buffer_dtype_at`](Self::with_buffer_dtype_at) cast it.
    ///
    /// PyTorch's `buffer_dtype`, which Accelerate sets to its `mixed_precision`.
    pub const fn with_buffer_dtype(mut self, dtype: FloatDType) -> Self {
        self.buffer_dtype = Some(dtype);
        self
    }

    /// Sets the form in which parameters are stored between uses, and sent in all-gathers: trained
    /// ones in bf16, and frozen ones in bf16, or in 8 or 4 bits. Default: f32.
    ///
    /// `bnb_4bit_quant_storage` and `BitsAndBytesConfig` in Transformers, without which PyTorch's FSDP
    /// has no such parameters.
    pub const fn with_storage(mut self, policy: StoragePolicy) -> Self {
        self.storage = policy;
        self
    }

    /// Sets that all-gathers send trained matrices in 8 bits, with an f32 scale for each block of
    /// `block` elements: a power of two from 64 to 4096. Default: off.
    ///
    /// Shards, gradients and the optimizer's state are stored as without this option. A gathered
    /// element differs from the stored one by at most 1/254 of the largest magnitude of its block, and
    /// the rounding of f32. Blocks are counted from the first element of a matrix, so all strategies
    /// that gather have the same values, at any number of ranks. Under `NO_SHARD` nothing is gathered,
    /// and a `val()` outside of a forward has the exact values. Vectors are not sent. `None` turns the
    /// option off.
    ///
    /// Codes are made on the host. The qwZ of [ZeRO++](https://arxiv.org/abs/2306.10209), DeepSpeed's
    /// `zero_quantized_weights`.
    pub const fn with_quantized_gathers(mut self, block: Option<usize>) -> Self {
        self.quantized_gathers = block;
        self
    }

    /// Sets that reductions among a shard group send the gradients of sharded matrices in 8 bits, with
    /// an f32 scale for each block of `block` elements: a power of two from 64 to 4096. Default: off.
    ///
    /// Each rank quantises what it sends to each other rank, once, and the receiver adds up in f32. The
    /// mean differs from the exact one by at most the mean over the ranks of 1/254 of the largest
    /// magnitude of the gradient's block, and rounding. Blocks are counted from the first element of a
    /// matrix. `FULL_SHARD` and `SHARD_GRAD_OP` have the same values; other numbers of ranks have other
    /// gradients to add up. Vectors, replicated matrices and the all-reduce between the replicas of a
    /// hybrid strategy are not quantised. `None` turns the option off.
    ///
    /// Codes are made on the host. The qgZ of [ZeRO++](https://arxiv.org/abs/2306.10209) within one
    /// level of ranks, DeepSpeed's `zero_quantized_gradients`.
    pub const fn with_quantized_reductions(mut self, block: Option<usize>) -> Self {
        self.quantized_reductions = block;
        self
    }

    /// Sets what is stored in host memory in place of device memory. Default:
    /// [`OffloadPolicy::None`].
    ///
    /// PyTorch's `offload_policy` or `cpu_offload`, Accelerate's `fsdp_offload_params`.
    pub const fn with_offload(mut self, policy: OffloadPolicy) -> Self {
        self.offload = policy;
        self
    }

    /// Sets which units store only their inputs in forward, and recompute their forward in
    /// backward. Default: [`ActivationCheckpointing::Annotated`].
    ///
    /// A recomputed unit takes the time of a second forward. It needs no further all-gather, since
    /// backward gathers the unit in any case. PyTorch's `apply_activation_checkpointing`,
    /// Accelerate's `fsdp_activation_checkpointing`.
    pub const fn with_activation_checkpointing(mut self, which: ActivationCheckpointing) -> Self {
        self.activation_checkpointing = which;
        self
    }

    /// Sets whether recomputed units store their inputs in host memory until backward. Default:
    /// off.
    ///
    /// Float inputs are copied to the host and back; integer and Boolean inputs stay on the device.
    /// On Flex, whose tensors are in host memory, the option has no effect. PyTorch's
    /// `offload_wrapper`.
    pub const fn with_offload_activations(mut self, offload: bool) -> Self {
        self.offload_activations = offload;
        self
    }

    /// Adds parameters, by id, that sharding leaves unchanged. Each rank stores the whole parameter
    /// with its own values, and the gradients are not reduced. Default: none.
    ///
    /// PyTorch's `ignored_params`.
    pub fn with_ignored_params(mut self, params: impl IntoIterator<Item = ParamId>) -> Self {
        self.ignored_params.extend(params);
        self
    }

    /// Sets the number of elements below which a matrix is replicated on every rank, as vectors
    /// always are. Default: 0, which shards every matrix.
    ///
    /// A replicated matrix needs no all-gather, but every rank stores all of it, with its gradient
    /// and its optimizer state. DeepSpeed's `stage3_param_persistence_threshold`.
    pub const fn with_persist_below(mut self, elements: usize) -> Self {
        self.persist_below = elements;
        self
    }

    /// Sets whether rank 0's weights and running statistics are broadcast to all ranks. Default:
    /// on.
    ///
    /// When it is off, every rank must initialise the same weights, and a checksum of each
    /// parameter is compared. Ignored parameters are never broadcast. PyTorch's
    /// `sync_module_states`, Accelerate's `fsdp_sync_module_states`.
    pub const fn with_sync_module_states(mut self, sync: bool) -> Self {
        self.sync_module_states = sync;
        self
    }

    /// Sets whether only one rank initialises a parameter and sends it to the others. Default: on.
    ///
    /// The option applies to parameters without a value yet, and only with
    /// [`sync_module_states`](Self::with_sync_module_states). The other ranks then allocate no more
    /// than their shards and the parameters that are being received. Without `sync_module_states`,
    /// every rank initialises all parameters, one at a time. Accelerate's
    /// `fsdp_cpu_ram_efficient_loading`.
    ///
    /// Rank 0 initialises all parameters. With a [`seed`](Self::with_seed), the first rank of each
    /// process takes a share of them, if its rayon pool has more than one thread. Every process
    /// must then be able to initialise any parameter.
    ///
    /// Modules of `burn::nn` are built with parameters that have no value yet: `Initializer::init`
    /// returns a [lazy](burn::module::Param::uninitialized) parameter. `Param::from_tensor`,
    /// `Param::from_data`, and a module that was trained or loaded, hold full values on each rank
    /// until [`fully_shard`](crate::fully_shard) replaces them with shards.
    pub const fn with_cpu_ram_efficient_loading(mut self, efficient: bool) -> Self {
        self.cpu_ram_efficient_loading = efficient;
        self
    }

    /// Sets whether no rank initialises any parameter, because all of them are loaded afterwards.
    /// Default: off.
    ///
    /// Shards are allocated from shapes alone, and values that parameters already have are dropped.
    /// The use of a parameter before it is loaded is the error
    /// [`ScheduleError::NotLoaded`](crate::errors::ScheduleError::NotLoaded). In PyTorch this is a model on
    /// the `meta` device.
    pub const fn with_deferred_init(mut self, deferred: bool) -> Self {
        self.deferred_init = deferred;
        self
    }

    /// Sets the seed of parameter initialisation and of the masks of
    /// [`nn::Dropout`](crate::nn::Dropout). Runs with the same seed repeat exactly. Default: none.
    ///
    /// Each parameter without a value is initialised from a seed derived from this one. Without a
    /// seed, dropout uses seed 0, and initialisation uses the state of Burn's generator.
    pub const fn with_seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Sets whether the first three optimizer steps check that the optimizer steps shards as it
    /// steps whole parameters. Default: on.
    ///
    /// An optimizer that clips by norm or needs whole matrices is then an error:
    /// [`ScheduleError::OptimizerClipsByNorm`](crate::errors::ScheduleError::OptimizerClipsByNorm) or
    /// [`ScheduleError::OptimizerNeedsMatrix`](crate::errors::ScheduleError::OptimizerNeedsMatrix). Turn
    /// the check off for an optimizer whose result on shards is wanted, or that draws random
    /// numbers.
    pub const fn with_optimizer_check(mut self, check: bool) -> Self {
        self.optimizer_check = check;
        self
    }
}
