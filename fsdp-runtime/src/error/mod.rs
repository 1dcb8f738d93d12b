//! One enum per concern; variants carry data, their text says what would be right.

mod checkpoint;
mod collective;
mod not_recomputable;
mod panic;
mod poison;
mod pretrained;

use burn::tensor::DType;

pub use self::checkpoint::CheckpointError;
pub use self::collective::CollectiveError;
use self::collective::join;
pub use self::not_recomputable::NotRecomputable;
pub(crate) use self::panic::{panic_message, raise};
pub(crate) use self::poison::IgnorePoison;
pub use self::pretrained::{LoadError, SaveError};
use crate::layout::{MeshError, Rank, WorldSize};

/// Anything that can go wrong in sharded training.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A model that cannot be sharded.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// A collective that did not complete.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// A unit used in a way the schedule cannot serve.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// Weights that cannot be loaded, or do not fit the model.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Weights that cannot be written.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// A checkpoint folder that cannot be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

/// Why a model cannot be sharded. Paths are module paths, such as `encoder.layers.3.up.weight`.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ShardError {
    /// A world size or a shard size that forms no mesh.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// A model without float parameters.
    #[error("`{model}` has no float parameter to shard")]
    EmptyModel {
        /// The model's type.
        model: &'static str,
    },
    /// One parameter at two places, undeclared.
    #[error(
        "`{first}` and `{second}` are clones of one parameter; declare them with \
         `tie(\"{first}\" = \"{second}\")` on the unit that holds both, or initialise them apart"
    )]
    SharedParameter {
        /// The place found first.
        first: String,
        /// The place found next.
        second: String,
    },
    /// A parameter that is ignored, and tied to another or at two places.
    #[error(
        "`{ignored}` is under `ignored_params` and one weight with `{other}`, whose gradients it would \
         lack; leave it out of `ignored_params`, or hold the two apart"
    )]
    IgnoredTie {
        /// The ignored parameter.
        ignored: String,
        /// The other place.
        other: String,
    },
    /// The two places of a tie hold matrices of different shapes.
    #[error(
        "tied weights must have one shape: `{first}` is {first_shape:?}, `{second}` is \
         {second_shape:?}; hold the second in the first's orientation and transpose in `forward`"
    )]
    TieShape {
        /// The place that owns the weight.
        first: String,
        /// Its shape.
        first_shape: Vec<usize>,
        /// The place that aliases it.
        second: String,
        /// Its shape.
        second_shape: Vec<usize>,
    },
    /// `fully_shard` was called on this model, or on a clone of it, before.
    #[error("`{path}` is sharded already; call `fully_shard` once, on the whole model")]
    AlreadySharded {
        /// The first sharded parameter.
        path: String,
    },
    /// A parameter under another reparameterization than a LoRA adapter, or under any in a module that
    /// FSDP does not look into.
    #[error(
        "`{path}` carries the reparameterization `{name}`; shard the model first, or call \
         `materialize()` to fold it in"
    )]
    Reparameterized {
        /// The parameter.
        path: String,
        /// The reparameterization's name.
        name: String,
    },
    /// A parameter of a dtype that cannot be sharded.
    #[error("`{path}` is {dtype:?}; only f32, bf16 and f16 parameters can be sharded")]
    UnsupportedDtype {
        /// The parameter.
        path: String,
        /// Its dtype.
        dtype: DType,
    },
    /// A parameter initialised in a dtype that its device does not compute.
    #[error(
        "`{path}` is {dtype:?}, in which {device} does not compute; it does in {computed}: initialise \
         the model in one of these, or set a `param_dtype`"
    )]
    DtypeNotComputed {
        /// The parameter.
        path: String,
        /// Its dtype.
        dtype: DType,
        /// The device.
        device: String,
        /// What works there.
        computed: String,
    },
    /// A running statistic in f32, in a unit whose inputs are cast to another type.
    #[error(
        "`{path}` is a `{ty}` in f32, which does not mix with {dtype:?}, to which the inputs of {unit} \
         are cast; hold its module in a unit of its own that `mixed_precision_for` leaves in f32, as \
         `mixed_precision_for(unit_types![..], MixedPrecisionPolicy::new())` does"
    )]
    FullPrecision {
        /// The module.
        path: String,
        /// Its type.
        ty: &'static str,
        /// The unit it lies in.
        unit: String,
        /// The type of that unit's inputs.
        dtype: DType,
    },
    /// A parameter that is initialised to another shape than it declares.
    #[error(
        "`{path}` declares the shape {declared:?} and is initialised to {found:?}; build a `Linear` \
         with `LinearLayout::Row`"
    )]
    InitShape {
        /// The parameter.
        path: String,
        /// What `Param::lazy_shape` says.
        declared: Vec<usize>,
        /// What it is initialised to.
        found: Vec<usize>,
    },
    /// An integer or Boolean parameter.
    #[error(
        "`{path}` is an integer or Boolean parameter, which has no gradient to reduce; hold it as \
         a plain tensor in a `#[module(skip)]` field"
    )]
    NotFloat {
        /// The parameter.
        path: String,
    },
    /// Parameters on several devices.
    #[error("the parameters of one rank lie on several devices ({devices}); move them to one")]
    SeveralDevices {
        /// Each of them, with the first parameter there.
        devices: String,
    },
    /// A device no engine can shard on.
    #[error("cannot shard on {device}: only Flex and CubeCL devices are supported")]
    UnsupportedDevice {
        /// The device's name.
        device: String,
    },
    /// The ranks do not agree on the model or on how to train it.
    #[error(
        "the ranks differ: rank 0 has `{expected}`, rank {ranks} has `{found}`; start all with one \
         program, one model and one set of options",
        ranks = join(ranks)
    )]
    ModelMismatch {
        /// The ranks that have `found`.
        ranks: Vec<Rank>,
        /// Rank 0's line of the fingerprint.
        expected: String,
        /// Theirs, the first that differs.
        found: String,
    },
    /// The ranks initialised one parameter to different values.
    #[error(
        "rank {rank} initialised `{path}` to other values than rank 0; seed every rank alike, or \
         set `sync_module_states` to broadcast rank 0's"
    )]
    ValueMismatch {
        /// The rank that differs.
        rank: Rank,
        /// The parameter.
        path: String,
    },
    /// A checkpointed unit that cannot be run again from its inputs.
    #[error("{unit} is checkpointed, but `{input}` of `{ty}::{forward}` {}", obstacle.advice())]
    NotReplayable {
        /// The unit.
        unit: String,
        /// Its type.
        ty: &'static str,
        /// The method.
        forward: &'static str,
        /// The input, or what else of the method.
        input: &'static str,
        /// What stands in the way.
        obstacle: NotRecomputable,
    },
    /// A checkpointed unit that holds a module which does not do the same twice.
    #[error(
        "{unit} is checkpointed, but `{path}` is a `{ty}`, which does not do the same when the \
         forward is run again in backward; {instead}"
    )]
    Unrepeatable {
        /// The unit.
        unit: String,
        /// The module.
        path: String,
        /// Its type.
        ty: &'static str,
        /// What to write in its place.
        instead: &'static str,
    },
    /// A checkpointed unit that holds a trainable parameter which is not managed.
    #[error(
        "{unit} is checkpointed, but `{path}` in it is under `ignored_params`, and would get no \
         gradient from the recomputed forward; let it be sharded, freeze it, or leave the unit out \
         of `activation_checkpointing`"
    )]
    IgnoredInCheckpoint {
        /// The unit.
        unit: String,
        /// The parameter.
        path: String,
    },
    /// An option out of its range.
    #[error("option `{option}` is {value}; {expected}")]
    InvalidOption {
        /// The option's name.
        option: &'static str,
        /// What was given.
        value: String,
        /// What would be right.
        expected: String,
    },
}

/// A unit used in a way the schedule cannot serve.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// Two units that are live at once share a buffer.
    #[error(
        "{unit} needs the buffer that {owner} still uses; raise the option `slots` above {slots}"
    )]
    GatherBufferBusy {
        /// The unit that needs the buffer.
        unit: String,
        /// The unit that uses it.
        owner: String,
        /// The ring's present size.
        slots: usize,
    },
    /// A unit whose shards no hooked forward has read.
    #[error(
        "{unit} is needed, but `{path}` was read by no forward; a tied weight can be used only \
         within the `forward` of the unit that declares the tie"
    )]
    NotRead {
        /// The unit.
        unit: String,
        /// The parameter.
        path: String,
    },
    /// A field unit whose output may hold tensors that FSDP cannot reach.
    #[error(
        "`{module}` is a unit through `#[fsdp(unit)]` and returned `{output}`, which FSDP does not \
         know the tensors of; hold it in a struct of your own under `#[fsdp_unit]`, whose `forward` \
         takes the tensors out, in place of `#[fsdp(unit)]`"
    )]
    OpaqueOutput {
        /// The type of the unit's module.
        module: &'static str,
        /// The type it returned.
        output: &'static str,
    },
    /// A parameter that `deferred_init` left without values.
    #[error(
        "`{path}` has no values yet: the model was built with `deferred_init`; load it first, or \
         leave the option off"
    )]
    NotLoaded {
        /// The first such parameter.
        path: String,
    },
    /// `Tensor::backward` instead of `Fsdp::backward`.
    #[error(
        "the gradients of the last backward pass were never collected; call `model.backward(loss)` \
         on the sharded model in place of `loss.backward()`"
    )]
    GradientsNotCollected,
    /// A parameter with a gradient on some of the ranks that hold it.
    #[error(
        "`{path}` has a gradient on other ranks, but rank {rank} has {found} for its \
         {expected} elements; give every rank's optimizer what its own `backward` returned"
    )]
    GradientMismatch {
        /// The parameter.
        path: String,
        /// The rank that differs.
        rank: Rank,
        /// Elements of that rank's shard.
        expected: usize,
        /// What that rank has.
        found: String,
    },
    /// Ranks that scale their losses by different numbers.
    #[error(
        "rank {rank} scales its loss by {found}, rank 0 by {expected}; make the `GradScaler` alike \
         on every rank, and call its `unscale` on every rank each step"
    )]
    LossScaleMismatch {
        /// The rank that differs.
        rank: Rank,
        /// Its loss scale.
        found: f32,
        /// Rank 0's.
        expected: f32,
    },
    /// A checkpointed unit whose forward drew from other dropout layers when it was run again.
    #[error(
        "the forward of a checkpointed unit did not call the same dropout layers in the same order \
         when it was run again; make it depend on its inputs and parameters alone, or leave the unit \
         out of `activation_checkpointing`"
    )]
    OtherDraws,
    /// A checkpointed unit whose forward returned other tensors when it was run again.
    #[error(
        "the forward of the checkpointed unit {unit} returned tensors of the shapes {found:?} when it \
         was run again, and of {expected:?} before; make it depend on its inputs and parameters \
         alone, or leave the unit out of `activation_checkpointing`"
    )]
    OtherOutputs {
        /// The unit.
        unit: String,
        /// The shapes the first time.
        expected: Vec<Vec<usize>>,
        /// The shapes now.
        found: Vec<Vec<usize>>,
    },
    /// A checkpointed unit whose forward computed other values when it was run again. Looked for in
    /// debug builds alone.
    #[error(
        "the forward of the checkpointed unit {unit} computed other values when it was run again, so \
         its gradients would be wrong; make it depend on its inputs and parameters alone (random \
         numbers through `fsdp_runtime::nn::Dropout` or as an input, not `Tensor::random`), or leave \
         the unit out of `activation_checkpointing`"
    )]
    OtherValues {
        /// The unit.
        unit: String,
    },
    /// A checkpointed unit whose forward used a tracked tensor from elsewhere.
    #[error(
        "the forward of the checkpointed unit {unit} used a tracked tensor that is neither one of its \
         inputs nor a parameter; hand it to the forward as an input, `detach` it, or leave the unit \
         out of `activation_checkpointing`"
    )]
    TrackedFromElsewhere {
        /// The unit.
        unit: String,
    },
    /// A loss of more than one element, or one without a graph.
    #[error("the loss is {found}; `backward` takes one tracked element")]
    InvalidLoss {
        /// What was given.
        found: String,
    },
}

/// A launch that ended in an error: the first rank that failed, and why.
#[derive(Debug, thiserror::Error)]
#[error("{}{source}", place(*rank, *world))]
pub struct LaunchError {
    /// The rank that failed first.
    pub rank: Rank,
    /// The number of ranks.
    pub world: WorldSize,
    /// What that rank returned, or its panic's message.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

/// Which rank it was, where there were several.
fn place(rank: Rank, world: WorldSize) -> String {
    if world == WorldSize::ONE { String::new() } else { format!("rank {rank} of {world}: ") }
}

/// A rank's panic, as the error [`launch`](crate::launch) returns for it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("panicked: {message}")]
pub struct RankPanic {
    /// The panic's message.
    pub message: String,
}
