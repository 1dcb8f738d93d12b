//! Errors of sharding a model.

use burn::tensor::DType;

use super::not_recomputable::NotRecomputable;
use super::text::rank_list;
use crate::layout::{MeshError, Rank, WorldSize};

/// The reason why a model cannot be sharded.
///
/// Paths are module paths, such as `encoder.layers.3.up.weight`.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ShardError {
    /// A world size or shard size that cannot form a mesh.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// A model without float parameters.
    #[error(
        "`{model}` has no float parameter to shard; pass a model with at least one float parameter \
         that is not under `ignored_params`"
    )]
    EmptyModel {
        /// Type of the model.
        model: &'static str,
    },
    /// A matrix that tensor parallel ranks cannot split in equal parts.
    #[error(
        "`{path}` has size {size} in dimension {dim}, along which {ranks} tensor parallel ranks cannot split \
         it in equal parts; set `tensor_parallel` to one of {}",
        divisors(*size)
    )]
    UnevenSplit {
        /// Path of the parameter.
        path: String,
        /// The dimension, from 0.
        dim: usize,
        /// Size of the parameter along the dimension.
        size: usize,
        /// Number of tensor parallel ranks.
        ranks: WorldSize,
    },
    /// Tensor parallel ranks for a model without split layers.
    #[error(
        "the model has no layer that {ranks} tensor parallel ranks can split; write `#[fsdp(column)]` and \
         `#[fsdp(row)]` on fields of `fsdp_runtime::nn::Linear`, or set `tensor_parallel` to 1"
    )]
    NothingToSplit {
        /// Number of tensor parallel ranks.
        ranks: WorldSize,
    },
    /// A call that needs whole matrices, in a model of which tensor parallel ranks have parts.
    #[error(
        "{what} takes whole matrices, of which {ranks} tensor parallel ranks have parts; {instead}"
    )]
    SplitMatrices {
        /// The call.
        what: &'static str,
        /// Number of tensor parallel ranks.
        ranks: WorldSize,
        /// What to do instead.
        instead: &'static str,
    },
    /// One parameter in two fields that no tie declares.
    #[error(
        "`{first}` and `{second}` are clones of one parameter; declare them with \
         `tie(\"{first}\" = \"{second}\")` on the unit that contains both, or initialise them \
         separately"
    )]
    SharedParameter {
        /// Path that the traversal reached first.
        first: String,
        /// Path that the traversal reached second.
        second: String,
    },
    /// An ignored parameter that is tied to another one, or that appears in two fields.
    #[error(
        "`{ignored}` is under `ignored_params`, but is the same weight as `{other}`, whose gradients \
         it would not receive; remove it from `ignored_params`, or use two separate parameters"
    )]
    IgnoredTie {
        /// Path of the ignored parameter.
        ignored: String,
        /// Path of the other field.
        other: String,
    },
    /// A tie of two matrices with different shapes.
    #[error(
        "tied weights must have the same shape, but `{first}` is {first_shape:?} and `{second}` is \
         {second_shape:?}; store the second in the orientation of the first and transpose it in \
         `forward`"
    )]
    TieShape {
        /// Path of the field that owns the weight.
        first: String,
        /// Shape of the weight at `first`.
        first_shape: Vec<usize>,
        /// Path of the field that is an alias of the weight.
        second: String,
        /// Shape of the weight at `second`.
        second_shape: Vec<usize>,
    },
    /// A model, or a clone of one, that `fully_shard` has sharded before.
    #[error("`{path}` is already sharded; call `fully_shard` once, on the unsharded model")]
    AlreadySharded {
        /// Path of the first sharded parameter.
        path: String,
    },
    /// A parameter under a reparameterization that sharding cannot keep.
    ///
    /// In modules that derive `FsdpModule`, a LoRA adapter is the only reparameterization that
    /// sharding keeps. In other modules it keeps none.
    #[error(
        "`{path}` has the reparameterization `{name}`; shard the model before applying it, or call \
         `materialize()` to merge it into the parameter"
    )]
    Reparameterized {
        /// Path of the parameter.
        path: String,
        /// Name of the reparameterization.
        name: String,
    },
    /// A parameter of a dtype that cannot be sharded.
    #[error("`{path}` is {dtype:?}; only f32, bf16 and f16 parameters can be sharded")]
    UnsupportedDtype {
        /// Path of the parameter.
        path: String,
        /// Dtype of the parameter.
        dtype: DType,
    },
    /// A parameter initialised in a dtype that the device does not support.
    #[error(
        "`{path}` is {dtype:?}, which {device} does not support (supported: {computed}); initialise \
         the model in a supported dtype, or set a `param_dtype`"
    )]
    DtypeNotComputed {
        /// Path of the parameter.
        path: String,
        /// Dtype of the parameter.
        dtype: DType,
        /// Name of the device.
        device: String,
        /// Dtypes that the device supports, separated by commas.
        computed: String,
    },
    /// A module with f32 running statistics, in a unit whose inputs are cast to another dtype.
    #[error(
        "`{path}` is a `{ty}` with f32 statistics, but mixed precision casts the inputs of its unit \
         {unit} to {dtype:?}; make it part of a separate unit that stays in f32, with \
         `mixed_precision_for(unit_types![..], MixedPrecisionPolicy::new())`"
    )]
    FullPrecision {
        /// Path of the module.
        path: String,
        /// Type of the module.
        ty: &'static str,
        /// Name of the unit that contains the module.
        unit: String,
        /// Dtype to which the inputs of the unit are cast.
        dtype: DType,
    },
    /// A parameter whose initialised shape differs from its declared shape.
    #[error(
        "`{path}` declares the shape {declared:?}, but is initialised with the shape {found:?}; \
         build a `Linear` with `LinearLayout::Row`"
    )]
    InitShape {
        /// Path of the parameter.
        path: String,
        /// Shape that `Param::lazy_shape` returns.
        declared: Vec<usize>,
        /// Shape of the initialised parameter.
        found: Vec<usize>,
    },
    /// An integer or Boolean parameter.
    #[error(
        "`{path}` is an integer or Boolean parameter, which has no gradient to reduce; store it as \
         a plain tensor in a `#[module(skip)]` field"
    )]
    NotFloat {
        /// Path of the parameter.
        path: String,
    },
    /// Parameters on several devices.
    #[error(
        "the parameters of one rank are on several devices ({devices}); move the model to one device"
    )]
    SeveralDevices {
        /// Every device, with the path of the first parameter on it.
        devices: String,
    },
    /// A device that no backend of this crate supports.
    #[error(
        "cannot shard on {device}; use Flex or a CubeCL device (`cpu`, `wgpu`, `cuda`) of the rank's own \
         machine; remote devices, NdArray and LibTorch are not supported"
    )]
    UnsupportedDevice {
        /// Name of the device.
        device: String,
    },
    /// Ranks with different models or options.
    #[error(
        "the ranks differ: rank 0 has `{expected}`, rank {ranks} has `{found}`; start every rank \
         with the same program, model and options",
        ranks = rank_list(ranks)
    )]
    ModelMismatch {
        /// Ranks that have `found`.
        ranks: Vec<Rank>,
        /// First line of rank 0's fingerprint that differs.
        expected: String,
        /// Line of the fingerprint of `ranks` at the place of `expected`.
        found: String,
    },
    /// A parameter that two ranks initialised to different values.
    #[error(
        "rank {rank} initialised `{path}` to other values than rank 0; use the same seed on every \
         rank, or set `sync_module_states` to broadcast rank 0's values"
    )]
    ValueMismatch {
        /// Rank that differs from rank 0.
        rank: Rank,
        /// Path of the parameter.
        path: String,
    },
    /// A unit under activation checkpointing whose forward cannot be recomputed from its inputs.
    #[error(
        "{unit} is under activation checkpointing, but `{input}` of `{ty}::{forward}` {}",
        reason.advice()
    )]
    NotRecomputable {
        /// Name of the unit.
        unit: String,
        /// Type of the unit.
        ty: &'static str,
        /// Name of the method.
        forward: &'static str,
        /// The input, or the part of the signature, that prevents recomputation.
        input: &'static str,
        /// The reason why the method cannot be recomputed.
        reason: NotRecomputable,
    },
    /// A unit under activation checkpointing with a module that behaves differently in a
    /// second run.
    #[error(
        "{unit} is under activation checkpointing, but `{path}` is a `{ty}`, which behaves \
         differently when the forward is recomputed in backward; {instead}"
    )]
    ModuleNotRecomputable {
        /// Name of the unit.
        unit: String,
        /// Path of the module.
        path: String,
        /// Type of the module.
        ty: &'static str,
        /// Advice on what to use instead.
        instead: &'static str,
    },
    /// A unit under activation checkpointing with a trainable parameter under `ignored_params`.
    #[error(
        "{unit} is under activation checkpointing, but its parameter `{path}` is under \
         `ignored_params` and would receive no gradient from the recomputed forward; remove it from \
         `ignored_params`, freeze it, or leave the unit out of `activation_checkpointing`"
    )]
    IgnoredInRecomputedUnit {
        /// Name of the unit.
        unit: String,
        /// Path of the parameter.
        path: String,
    },
    /// An option with a value that it does not accept.
    #[error("option `{option}` is {value}; {expected}")]
    InvalidOption {
        /// Name of the option.
        option: &'static str,
        /// Value that the option was given.
        value: String,
        /// Description of the accepted values.
        expected: String,
    },
}

/// Formats the divisors of a size up to 64, of which one is the number of tensor parallel ranks.
fn divisors(size: usize) -> String {
    let divisors = (1..=64).filter(|ranks| size.is_multiple_of(*ranks));
    divisors.map(|ranks| ranks.to_string()).collect::<Vec<_>>().join(", ")
}
