//! Errors of a sharded model in training.

use super::text::{loss_of, nonfinite, sizes};
use crate::layout::{Rank, StorageType, WorldSize};

/// A use of a sharded model that its schedule does not support.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// Tensor parallel ranks that take different batches.
    #[error(
        "tensor parallel ranks call a split layer with different inputs, but take the same batch: share the data \
         by `stats().mesh().rank` of `stats().mesh().world`, not by the worker's rank"
    )]
    DifferentInputs,
    /// Context parallel ranks whose attention does not see the keys of the others.
    #[error(
        "under `context_parallel` each rank has a part of each row, but no attention of this model has gathered \
         the keys of the other ranks: call `fsdp_runtime::nn::attention` in the `forward` of a unit, on a Flex or \
         CubeCL device, with query, key and value of one float dtype"
    )]
    NoContextAttention,
    /// Tensor parallel ranks whose losses differ.
    #[error(
        "tensor parallel ranks have different losses, {own} and {other}, but take the same batch: under \
         `sequence_parallel` write `#[fsdp(vocab)]` on the head, an `nn::LmHead`, and compute the loss of all \
         positions with `gather_sequence`"
    )]
    DifferentLosses {
        /// Loss of this rank.
        own: f64,
        /// Loss of another rank.
        other: f64,
    },
    /// Attention of this rank's part of the sequence.
    #[error(
        "attention is called with {positions} positions, where the last `column` layer returned {length}: under \
         `sequence_parallel` that layer gathers them, so take the length from its output, not from its input"
    )]
    PartOfSequence {
        /// Positions that the `column` layer returned.
        length: usize,
        /// Positions of the queries.
        positions: usize,
    },
    /// A value of a split layer without a dimension for the positions.
    #[error(
        "under `sequence_parallel` a split layer takes and returns `[rows, length, width]`, not {shape:?}: flatten \
         rows after it"
    )]
    NoSequence {
        /// Shape of the value.
        shape: Vec<usize>,
    },
    /// A whole parameter whose gradient differs between tensor parallel ranks.
    #[error(
        "`{path}` is whole on each tensor parallel rank, but its gradients differ: it is used with values that \
         are split over the ranks; write `#[fsdp(shared)]` on its field, so that the gradients are added"
    )]
    SplitGradient {
        /// Path of the parameter.
        path: String,
    },
    /// Dropout of values of which each tensor parallel rank has a part, in a layer that says nothing of it.
    #[error(
        "dropout `{path}` gets outputs of `column` layers, of which each tensor parallel rank has a part: the same \
         elements of all parts would be dropped; write `#[fsdp(column)]` on its field, or, if its values are whole, \
         call it before the `column` layers"
    )]
    DropoutOfParts {
        /// Path of the layer.
        path: String,
    },
    /// Dropout of whole values in a layer under `#[fsdp(column)]`.
    #[error(
        "dropout `{path}` is under `#[fsdp(column)]`, but gets values that no `column` layer has returned: each \
         tensor parallel rank would drop other elements of the same values; remove `column`, or hold another \
         `Dropout` for these values"
    )]
    DropoutOfWhole {
        /// Path of the layer.
        path: String,
    },
    /// Two units that are unsharded at the same time and share a gather buffer.
    #[error(
        "{unit} needs the gather buffer that {owner} still uses; raise the option `gather_buffers` above \
         {gather_buffers}"
    )]
    GatherBufferBusy {
        /// Name of the unit that needs the buffer.
        unit: String,
        /// Name of the unit that uses the buffer.
        owner: String,
        /// Number of gather buffers that the units of one nesting level share.
        gather_buffers: usize,
    },
    /// A unit with a shard that was not read in any hooked `forward`.
    #[error(
        "{unit} must be gathered, but no `forward` has read `{path}`; use a tied weight only within \
         the `forward` of the unit that declares the tie"
    )]
    NotRead {
        /// Name of the unit.
        unit: String,
        /// Path of the parameter.
        path: String,
    },
    /// A field unit whose output type may contain tensors that FSDP cannot find.
    #[error(
        "`{module}` is a unit through `#[fsdp(unit)]` and returned `{output}`, whose tensors FSDP \
         cannot find; in place of `#[fsdp(unit)]`, wrap it in a struct under `#[fsdp_unit]` whose \
         `forward` returns the tensors"
    )]
    OpaqueOutput {
        /// Type of the unit's module.
        module: &'static str,
        /// Type of the returned value.
        output: &'static str,
    },
    /// A unit that was called with tensors whose type a generic method hides.
    #[error(
        "an argument in the call of {unit} is a `{input}`, but the generic code around it \
         hides the type; write the bound `UnitValue` on the type parameter"
    )]
    OpaqueInput {
        /// Name of the unit.
        unit: String,
        /// Type of the argument.
        input: &'static str,
    },
    /// An argument of a unit under activation checkpointing that is a reference to a value with a trained
    /// parameter.
    #[error(
        "an argument in the call of {unit} is a `&{input}` with a trained parameter, which the \
         recomputation in backward would use outside of the parameter's own unit; make it a field of the \
         unit, compute its result outside and take that, or leave the unit out of \
         `activation_checkpointing`"
    )]
    TrainedReference {
        /// Name of the unit.
        unit: String,
        /// Type of the value behind the reference.
        input: &'static str,
    },
    /// An operation of Burn on float tensors of two dtypes, in the forward of a unit.
    #[error(
        "{operation} of a tensor in {left} and one in {right}, in the forward of {unit}: under mixed \
         precision its parameters and inputs have the `param_dtype`, and tensors in fields the \
         `buffer_dtype`; cast one of the two where they meet, as Burn's `RotaryEncoding` needs it, or set \
         `buffer_dtype`, `buffer_dtype_for` or `buffer_dtype_at`"
    )]
    DtypeMismatch {
        /// Name of the unit.
        unit: String,
        /// Name of the operation, as Burn reports it.
        operation: String,
        /// Dtype of one tensor.
        left: String,
        /// Dtype of the other tensor.
        right: String,
    },
    /// A panic in the forward of a unit, in code that has a part of the outputs of a `column` layer.
    #[error(
        "the forward of {unit} panicked after `{path}`, a `column` layer: {message}; if this is about a shape, each \
         of {ranks} tensor parallel ranks has a part of the layer's outputs: reshape by the width of a head, and \
         take the number of heads from the output, not from the configuration"
    )]
    PanicBetweenParts {
        /// Name of the unit.
        unit: String,
        /// Path of the weight of the `column` layer that ran last.
        path: String,
        /// Number of ranks that have a part of its outputs.
        ranks: WorldSize,
        /// Message of the panic.
        message: String,
    },
    /// A parameter without values, because `deferred_init` skipped its initialisation.
    #[error(
        "`{path}` has no values yet, because the model was built with `deferred_init`; load the \
         model first, or do not set `deferred_init`"
    )]
    NotLoaded {
        /// Path of the first such parameter.
        path: String,
    },
    /// A parameter that was unfrozen after sharding, and that is not stored in f32.
    #[error(
        "`{path}` requires a gradient, but it was frozen when the model was sharded, and is stored as \
         {storage}; unfreeze it before `fully_shard`, or give its unit the storage f32"
    )]
    FrozenStorage {
        /// Path of the parameter.
        path: String,
        /// Form in which the parameter is stored.
        storage: StorageType,
    },
    /// A call of `Tensor::backward` in place of `Fsdp::backward`.
    #[error(
        "the gradients of the last backward pass were not collected; call `model.backward(loss)` \
         on the sharded model in place of `loss.backward()`"
    )]
    GradientsNotCollected,
    /// A parameter that has a gradient on some ranks only.
    #[error(
        "`{path}` has a gradient on other ranks, but rank {rank} has {found} for its \
         {expected} elements; give each rank's optimizer the gradients that its own `backward` \
         returned"
    )]
    GradientMismatch {
        /// Path of the parameter.
        path: String,
        /// Rank that differs from the others.
        rank: Rank,
        /// Number of elements in the shard of the rank that differs.
        expected: usize,
        /// Description of the gradient on the rank that differs.
        found: String,
    },
    /// Ranks with different loss scales.
    #[error(
        "rank {rank} scales its loss by {found}, rank 0 by {expected}; create the same `GradScaler` \
         on every rank, and call `unscale` on every rank in each step"
    )]
    LossScaleMismatch {
        /// Rank that differs from rank 0.
        rank: Rank,
        /// Loss scale of the rank that differs.
        found: f32,
        /// Loss scale of rank 0.
        expected: f32,
    },
    /// A recomputed forward that called other dropout layers than the first forward.
    #[error(
        "the recomputed forward of a unit under activation checkpointing did not call the same \
         dropout layers in the same order as the first forward; make the forward depend only on its \
         inputs and parameters, or leave the unit out of `activation_checkpointing`"
    )]
    RandomDrawsMismatch,
    /// A recomputed forward that returned tensors of other shapes than the first forward.
    #[error(
        "the recomputed forward of {unit}, a unit under activation checkpointing, returned tensors \
         of the shapes {found:?}, but the first forward returned {expected:?}; make the forward \
         depend only on its inputs and parameters, or leave the unit out of \
         `activation_checkpointing`"
    )]
    RecomputedShapesMismatch {
        /// Name of the unit.
        unit: String,
        /// Shapes that the first forward returned.
        expected: Vec<Vec<usize>>,
        /// Shapes that the recomputed forward returned.
        found: Vec<Vec<usize>>,
    },
    /// A recomputed forward that computed other values than the first forward.
    ///
    /// Only debug builds check the values.
    #[error(
        "the recomputed forward of {unit}, a unit under activation checkpointing, computed other \
         values than the first forward, so its gradients would be wrong; make the forward depend \
         only on its inputs and parameters (take random numbers from `fsdp_runtime::nn::Dropout` or \
         as an input, not from `Tensor::random`), or leave the unit out of \
         `activation_checkpointing`"
    )]
    RecomputedValuesMismatch {
        /// Name of the unit.
        unit: String,
    },
    /// A unit under activation checkpointing whose forward used a tracked tensor that is neither an
    /// input nor a parameter.
    #[error(
        "the forward of {unit}, a unit under activation checkpointing, used a tracked tensor that is \
         neither one of its inputs nor a parameter; pass the tensor to the forward as an input, \
         `detach` it, or leave the unit out of `activation_checkpointing`"
    )]
    TrackedFromElsewhere {
        /// Name of the unit.
        unit: String,
    },
    /// A call of `unshard` while a pass needs the shared gather buffers.
    #[error(
        "units cannot be kept gathered now: {unit} runs, or its backward is still to come; call \
         `unshard` before the forward or after `backward`, and drop the outputs of forwards that get \
         no backward"
    )]
    UnshardDuringPass {
        /// Name of a unit in the pass.
        unit: String,
    },
    /// A change of the parameters while a guard of `unshard` keeps their values gathered.
    #[error(
        "the parameters are to change while {unit} is kept gathered, which would leave old values in \
         use; drop the guard of `unshard` before the optimizer steps or a state is loaded"
    )]
    ChangedWhileUnsharded {
        /// Name of the first unit that is kept gathered.
        unit: String,
    },
    /// A change of when units are gathered and resharded, or of the gradient divide factor, during a
    /// pass.
    #[error(
        "this setting cannot change now: {unit} runs, or its backward is still to come; change it \
         before the forward or after `backward`, and drop the outputs of forwards that get no backward"
    )]
    ControlledDuringPass {
        /// Name of a unit in the pass.
        unit: String,
    },
    /// A hook on gradients that returned another number of elements than it was given.
    #[error(
        "the hook of `set_gradient_hook` returned {found} elements for the {expected} of `{path}`; \
         return a tensor with as many elements as the hook is given"
    )]
    HookedGradient {
        /// Module path of the parameter.
        path: String,
        /// Number of elements that the hook was given.
        expected: usize,
        /// Number of elements that it returned.
        found: usize,
    },
    /// A path that names no unit of the model.
    #[error("the model has no unit at the path {path:?}; its units are {units:?}")]
    UnknownUnit {
        /// Path that was given.
        path: String,
        /// Paths of the units, in layout order; that of the outermost unit is empty.
        units: Vec<String>,
    },
    /// A model that has taken more memory on its device than
    /// [`Fsdp::set_memory_limit`](crate::Fsdp::set_memory_limit) allows.
    #[error(
        "the model took {used} bytes on its device, above the limit of {limit}; the largest holders: {}; use \
         more ranks, a smaller batch, half precision, offload or activation checkpointing, or raise the \
         limit",
        sizes(holders)
    )]
    MemoryLimit {
        /// Most bytes that the model may take on its device.
        limit: usize,
        /// Bytes that it took when it first exceeded the limit.
        used: usize,
        /// Largest holders at that moment with their bytes, such as ``gradients of `blocks.2` ``, the
        /// largest first.
        holders: Vec<(String, usize)>,
    },
    /// A closure of [`recompute`](crate::nn::recompute) that used a tracked tensor that is not one of its
    /// inputs.
    #[error(
        "the closure of `recompute` used a tracked tensor that is not one of its inputs, such as a \
         parameter of a module in it; pass the tensor as an input, as in `recompute((x, \
         self.up.weight.val()), |(x, up)| ..)`, or `detach` it"
    )]
    RecomputedCapture,
    /// A micro-batch whose loss is a sum with a weight, in a step that began with means, or the other way
    /// round.
    #[error(
        "the loss of this micro-batch is {}, but those of earlier ones of the same step are {}; in all \
         micro-batches of a step, call `accumulate` and `backward` with means, or `accumulate_sum` and \
         `backward_sum` with sums",
        loss_of(*sum),
        loss_of(!*sum)
    )]
    MixedLosses {
        /// Whether the loss is a sum, and earlier ones were means.
        sum: bool,
    },
    /// A weight of a loss that no gradient can be divided by.
    #[error(
        "the weight of the loss is {weight}; give `backward_sum` the number of counted tokens, or another \
         number that is 0 or above and is neither NaN nor out of the range of f32"
    )]
    InvalidWeight {
        /// The weight on this rank, or its sum over all ranks.
        weight: f64,
    },
    /// A step in which no rank counts a token.
    #[error(
        "the weight of the loss is 0 on every rank and in every micro-batch of the step, so there is no \
         mean; leave out a step without a counted token, and check that labels and masks do not exclude all"
    )]
    NoWeight,
    /// A loss with several elements, or without an autodiff graph.
    #[error("the loss is {found}; `backward` takes a tracked tensor of one element")]
    InvalidLoss {
        /// Description of the given loss.
        found: String,
    },
    /// Gradients whose norm is infinite or NaN, clipped with
    /// [`error_if_nonfinite`](crate::model::ClipOptions::with_error_if_nonfinite).
    #[error(
        "the norm of the gradients is {norm}: {}; no gradient was changed; check the batch of that step, lower \
         the learning rate, or use a `GradScaler` with f16",
        nonfinite(first.as_ref())
    )]
    NonFiniteNorm {
        /// The norm.
        norm: f64,
        /// Path of the first parameter in layout order whose gradient has an element that is infinite
        /// or NaN, and the lowest rank that stores such an element. `None` if all elements are
        /// finite and their norm overflows.
        first: Option<(String, Rank)>,
    },
    /// A loss that no trained parameter has contributed to, such as one made from data or detached.
    #[error(
        "the loss depends on no tracked tensor, so it has no gradients; compute it from the output of the \
         model's `forward`, without `detach`, `no_grad`, `valid` or a copy through `TensorData`"
    )]
    UntrackedLoss,
    /// A loss whose graph an earlier backward pass has used: Burn frees the graph as it goes.
    #[error(
        "an earlier backward pass has consumed the graph of this loss; run the model's `forward` again before \
         each `backward`, or add up losses that share a forward and call `backward` once"
    )]
    GraphConsumed,
    /// An optimizer that clips the gradient of a sharded parameter by its norm.
    ///
    /// Each rank would clip by the norm of its own shard.
    #[error(
        "the optimizer clips the gradient of `{path}` by norm, but the parameter is sharded and the \
         norm would be that of one shard; remove `grad_clipping` from the optimizer and call \
         `model.clip_grad_norm(&mut gradients, max_norm)` before the step, or step with \
         `optim::WholeParam`, which clips whole gradients"
    )]
    OptimizerClipsByNorm {
        /// Module path of the first such parameter.
        path: String,
    },
    /// An optimizer whose update of an element depends on the other elements of the parameter, such
    /// as LAMB, Adafactor and Muon, on a sharded parameter.
    #[error(
        "the optimizer needs the whole matrix `{path}`, which is sharded: stepped in pieces, a matrix \
         gets another update; step with `optim::WholeParam::new(optimizer)`, or accept this result \
         with the option `with_optimizer_check(false)`"
    )]
    OptimizerNeedsMatrix {
        /// Module path of the first such parameter.
        path: String,
    },
    /// An optimizer that could not be checked, because the gradients of one of the first steps were
    /// not those that `backward` returned.
    ///
    /// `backward` adds gradients for the check, which programs lose that build a new set of
    /// gradients.
    #[error(
        "the optimizer stepped the sharded parameter `{path}` with gradients that `backward` did not \
         return, so it could not be checked; call `model.check_optimizer(&optimizer)?` before the \
         first step"
    )]
    OptimizerNotChecked {
        /// Module path of the parameter.
        path: String,
    },
}
