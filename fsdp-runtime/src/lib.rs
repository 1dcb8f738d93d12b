//! Fully sharded data parallel training for Burn.
//!
//! Annotate a model's units with [`#[fsdp_unit]`](macro@fsdp_unit), start ranks with [`launch`], shard
//! with [`fully_shard`], and train as ever: the sharded model is a Burn module, and Burn's own
//! optimizers step it. The repository's README has the tour.
#![deny(missing_docs)]

#[allow(unused_extern_crates, reason = "the macros' expansion names the crate")]
extern crate self as fsdp_runtime;

mod attach;
mod autodiff;
mod backend;
mod check;
pub mod checkpoint;
mod collectives;
pub mod config;
#[cfg(any(feature = "cli", feature = "nccl"))]
pub mod cuda;
pub mod env;
mod error;
mod field_call;
mod forecast;
mod fully_shard;
mod grad_scaler;
mod group;
mod hooks;
mod ignored;
pub mod kernels;
mod launch;
mod layout;
mod leaf;
mod memory;
mod mesh;
mod modules;
pub mod nn;
mod norm;
mod obstacle;
pub mod optim;
mod optimizer_state;
mod options;
mod param;
mod plan;
mod precision;
mod pretrained;
mod recompute;
mod replay;
mod schedule;
mod slot;
mod state_dict;
mod unit;
mod unit_layout;
mod unit_type;
mod unscale;
mod wrapping;

pub use checkpoint::CheckpointError;
#[cfg(feature = "nccl")]
pub use collectives::store::StoreError;
pub use error::{
    CollectiveError, EngineError, Error, LaunchError, RankPanic, ScheduleError, ShardError,
};
pub use forecast::{HostForecast, MemoryError, MemoryForecast};
pub use fsdp_macros::{FsdpModule, UnitValue, fsdp_unit};
pub use fully_shard::{Fsdp, fully_shard};
pub use grad_scaler::{GradScaler, GradScalerConfig, Unscaled};
pub use hooks::UnitValue;
pub use launch::{Engine, LaunchOptions, Worker, launch};
pub use layout::{ALIGNMENT, FlatLayout};
pub use memory::{DeviceUsage, Memory, Usage};
pub use mesh::{Mesh, Rank, WorldSize};
pub use norm::Norm;
pub use optimizer_state::{LocalTensor, OptimizerState, ParameterState};
pub use options::{
    ActivationCheckpointing, BackwardPrefetch, FsdpOptions, GradientAccumulation, OffloadPolicy,
    ReshardAfterForward, ShardingStrategy, WrapPolicy,
};
pub use param::Sharded;
pub use precision::MixedPrecisionPolicy;
pub use pretrained::{
    LoadError, LoadOptions, LoadReport, SaveDtype, SaveError, SavePretrained, from_pretrained,
    merge_safetensors,
};
pub use schedule::Counts;
pub use state_dict::{
    FullState, LocalState, Recipient, ShardedState, ShardedTensor, UnshardedState,
};
pub use unit::{
    Attach, Child, FsdpModule, FsdpUnit, HookedForward, Kind, Node, Obstacle, Tie, Walk,
};
pub use unit_type::UnitType;
pub use wrapping::{WrappedUnit, Wrapping};

/// What a program that trains a sharded model needs.
pub mod prelude {
    pub use crate::{
        ActivationCheckpointing, BackwardPrefetch, Engine, Fsdp, FsdpModule, FsdpOptions, FsdpUnit,
        GradScaler, GradientAccumulation, LaunchOptions, MixedPrecisionPolicy, Norm, OffloadPolicy,
        Recipient, ReshardAfterForward, ShardingStrategy, UnitValue, Unscaled, Worker, WrapPolicy,
        fsdp_unit, fully_shard, launch, unit_types,
    };
}

/// What generated code calls. Not a public interface.
#[doc(hidden)]
pub mod __private {
    pub use burn::tensor::DispatchTensor;

    pub use crate::check::*;
    pub use crate::field_call::*;
    pub use crate::hooks::*;
    pub use crate::leaf::*;
    pub use crate::replay::*;
    pub use crate::unit::*;
}
