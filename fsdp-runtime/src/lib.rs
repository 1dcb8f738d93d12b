//! Fully sharded data parallel training for Burn.
//!
//! Annotate a model's units with [`#[fsdp_unit]`](macro@fsdp_unit), start ranks with [`launch`],
//! shard with [`fully_shard`], and train as before: the sharded model is a Burn module, and Burn's
//! own optimizers step it.
//!
#![cfg_attr(doc, doc = "The [guide] begins with a [first sharded model](guide::first_model).")]
#![deny(missing_docs)]

#[cfg(panic = "abort")]
compile_error!(
    "fsdp-runtime needs `panic = \"unwind\"`: the error of a collective inside `forward` or `backward` \
     unwinds to `launch`, which returns it; remove `panic = \"abort\"` from the profile"
);

#[allow(unused_extern_crates, reason = "the macros' expansion names the crate")]
extern crate self as fsdp_runtime;

mod backend;
pub mod checkpoint;
mod collectives;
mod error;
mod fully_shard;
#[cfg(any(doc, doctest))]
#[path = "../docs/guide.rs"]
pub mod guide;
mod launch;
mod layout;
mod module;
pub mod nn;
mod observe;
pub mod optim;
mod options;
mod param_group;
pub mod plan;
mod runtime;
#[cfg(feature = "train")]
pub mod train;

pub use fsdp_macros::{FsdpModule, UnitValue, fsdp_unit};

pub use backend::Norm;
pub use checkpoint::filter::ParamFilter;
pub use checkpoint::load_report::LoadReport;
pub use checkpoint::pretrained::{
    LoadOptions, SaveAdapters, SaveDtype, SavePretrained, from_pretrained, merge_safetensors,
};
pub use checkpoint::state_dict::{
    FullState, LocalState, LocalTensor, OptimizerState, ParameterState, Recipient, ShardedState,
    ShardedTensor, StateDictOptions,
};
#[cfg(any(feature = "cli", feature = "nccl"))]
pub use collectives::cuda;
#[cfg(feature = "nccl")]
pub use collectives::nccl::NcclJoinError;
#[cfg(feature = "nccl")]
pub use collectives::store::StoreError;
#[cfg(feature = "nccl")]
#[doc(hidden)]
pub use collectives::store::parse_store_message;
#[cfg(feature = "train")]
pub use error::LearnerError;
pub use error::{
    CheckpointError, CollectiveError, Error, LaunchError, LoadError, LoraError, NotRecomputable,
    RankPanic, SaveError, ScheduleError, ShardError,
};
pub use fully_shard::{
    ClipOptions, Fsdp, ReducedGradient, Stats, UnitHandle, Unsharded, fully_shard,
};
pub use launch::{Engine, EngineError, LaunchOptions, ReduceOp, Worker, env, launch};
pub use layout::{Mesh, MeshError, Rank, StorageType, WorldSize};
pub use module::lora::LoraConfig;
pub use module::{FsdpModule, FsdpUnit, HookedForward, UnitType, UnitValue};
pub use observe::memory_file::{MemoryFile, MemoryFileError};
#[cfg(feature = "trace")]
pub use observe::trace::{FsdpTrace, TraceError};
pub use optim::{GradScaler, GradScalerConfig, Unscaled};
pub use options::config;
pub use options::{
    ActivationCheckpointing, BackwardPrefetch, CheckpointingConfig, FsdpConfig, FsdpOptions,
    GradientAccumulation, MixedPrecisionPolicy, OffloadPolicy, ReshardAfterForward,
    ShardingStrategy, StoragePolicy, WrapConfig, WrapPolicy,
};
pub use param_group::memory::{
    DeviceUsage, HostForecast, Memory, MemoryError, MemoryEvent, MemoryForecast, MemoryHolder,
    MemoryMark, MemoryPeak, MemorySample, MemoryTimeline, Usage,
};
pub use param_group::wrapping::{WrappedUnit, Wrapping};
pub use runtime::schedule::Counts;

/// The kernels of sharded training, as functions of Burn tensors.
pub mod kernels {
    pub use crate::backend::ops::*;
}

/// The types and functions that a program needs to train a sharded model.
pub mod prelude {
    pub use crate::{
        ActivationCheckpointing, BackwardPrefetch, Engine, Error, Fsdp, FsdpModule, FsdpOptions,
        FsdpUnit, GradScaler, GradientAccumulation, LaunchOptions, MixedPrecisionPolicy, Norm,
        OffloadPolicy, Recipient, ReshardAfterForward, ShardingStrategy, StoragePolicy,
        StorageType, UnitValue, Unscaled, Worker, WrapPolicy, fsdp_unit, fully_shard, launch,
        unit_types,
    };
}

/// The items that generated code names. Not a public interface.
#[doc(hidden)]
pub mod __private {
    pub use burn::tensor::DispatchTensor;

    pub use crate::error::NotRecomputable;
    pub use crate::layout::{ALIGNMENT, FlatLayout};
    pub use crate::module::const_check::*;
    pub use crate::module::opaque::*;
    pub use crate::module::*;
    pub use crate::runtime::field_call::*;
    pub use crate::runtime::hooks::*;
    pub use crate::runtime::recompute::*;
}

/// The Rust blocks of the README compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
