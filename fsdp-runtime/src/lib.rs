//! Fully sharded data parallel training for Burn.
//!
//! Annotate a model's units with [`#[fsdp_unit]`](macro@fsdp_unit), start ranks with [`launch`](launch()),
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
pub mod launch;
mod layout;
mod module;
pub mod nn;
mod observe;
pub mod optim;
pub mod options;
mod param_group;
pub mod plan;
mod runtime;
#[cfg(feature = "train")]
pub mod train;

pub use fsdp_macros::{FsdpModule, UnitValue, fsdp_unit};

pub use backend::Norm;
#[cfg(feature = "nccl")]
#[doc(hidden)]
pub use collectives::store::parse_store_message;
pub use error::Error;
pub use fully_shard::{Fsdp, fully_shard};
pub use launch::{Engine, LaunchOptions, Worker, launch};
pub use layout::{ContextPart, Mesh, Rank, WorldSize};
pub use module::{FsdpModule, FsdpUnit, UnitValue};
pub use options::{FsdpOptions, config};

/// Typed errors of every part, as data: what was wrong, where, and what would be right.
#[cfg_attr(
    doc,
    doc = "\n[A page of the guide](crate::guide::troubleshooting) is about this module."
)]
pub mod errors {
    #[cfg(feature = "nccl")]
    pub use crate::collectives::nccl::NcclJoinError;
    #[cfg(feature = "nccl")]
    pub use crate::collectives::store::StoreError;
    #[cfg(feature = "train")]
    pub use crate::error::LearnerError;
    pub use crate::error::{
        CheckpointError, CollectiveError, DevicePanic, Error, LaunchError, LoadError, LoraError,
        NotRecomputable, RankPanic, SaveError, ScheduleError, ShardError,
    };
    pub use crate::launch::EngineError;
    pub use crate::layout::MeshError;
    pub use fsdp_kernels::InvalidNorm;
}

/// LoRA adapters: small trained matrices beside frozen ones.
#[cfg_attr(doc, doc = "\n[A page of the guide](crate::guide::lora) is about this module.")]
pub mod lora {
    pub use crate::module::lora::LoraConfig;
}

/// Memory of a rank: forecast, accounting by kind, over time, and as a file.
#[cfg_attr(doc, doc = "\n[A page of the guide](crate::guide::memory) is about this module.")]
pub mod memory {
    pub use crate::observe::memory_file::{MemoryFile, MemoryFileError};
    pub use crate::param_group::memory::{
        DeviceUsage, HostForecast, Memory, MemoryError, MemoryEvent, MemoryForecast, MemoryHolder,
        MemoryMark, MemoryPeak, MemorySample, MemoryTimeline, Usage,
    };
}

/// What a sharded model says of itself, and what a program decides unit by unit: measurements, units
/// that stay gathered, hooks on gradients, clipping.
#[cfg_attr(doc, doc = "\n[A page of the guide](crate::guide::options) is about this module.")]
pub mod model {
    pub use crate::fully_shard::{ClipOptions, ReducedGradient, Stats, UnitHandle, Unsharded};
    pub use crate::module::HookedForward;
    pub use crate::param_group::wrapping::{WrappedUnit, Wrapping};
    pub use crate::runtime::schedule::Counts;
}

/// Files of pretrained models: those of Hugging Face, of PyTorch and of PEFT, read and written.
#[cfg_attr(doc, doc = "\n[A page of the guide](crate::guide::checkpoints) is about this module.")]
pub mod pretrained {
    pub use crate::checkpoint::pretrained::{
        LoadOptions, SaveAdapters, SaveDtype, SavePretrained, from_pretrained, merge_safetensors,
    };
}

/// State dicts of a sharded model: full, sharded, or of this rank.
#[cfg_attr(doc, doc = "\n[A page of the guide](crate::guide::checkpoints) is about this module.")]
pub mod state {
    pub use crate::checkpoint::filter::ParamFilter;
    pub use crate::checkpoint::load_report::LoadReport;
    pub use crate::checkpoint::state_dict::{
        FullState, LocalState, LocalTensor, OptimizerState, ParameterState, Recipient,
        ShardedState, ShardedTensor, StateDictOptions,
    };
}

/// Traces of what ranks do over time, for Perfetto and Chrome.
#[cfg(feature = "trace")]
#[cfg_attr(doc, doc = "\n[A page of the guide](crate::guide::trace) is about this module.")]
pub mod trace {
    pub use crate::observe::trace::{FsdpTrace, TraceError};
}

/// The kernels of sharded training, as functions of Burn tensors.
#[cfg_attr(doc, doc = "\n[A page of the guide](crate::guide::kernels) is about this module.")]
pub mod kernels {
    pub use crate::backend::ops::*;
}

/// The types and functions that a program needs to train a sharded model.
pub mod prelude {
    pub use crate::model::ClipOptions;
    pub use crate::optim::{GradScaler, Unscaled};
    pub use crate::options::{
        ActivationCheckpointing, BackwardPrefetch, ContextExchange, GradientAccumulation,
        MixedPrecisionPolicy, OffloadPolicy, ReshardAfterForward, ShardingStrategy, StoragePolicy,
        StorageType, WrapPolicy,
    };
    pub use crate::state::Recipient;
    pub use crate::{
        Engine, Error, Fsdp, FsdpModule, FsdpOptions, FsdpUnit, LaunchOptions, Norm, Rank,
        UnitValue, Worker, fsdp_unit, fully_shard, launch, unit_types,
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
    pub use crate::runtime::forward_panic::run;
    pub use crate::runtime::hooks::*;
    pub use crate::runtime::recompute::*;
    pub use crate::runtime::references::*;
    pub use crate::runtime::tables::pre_forward_with_tables;
}

/// The Rust blocks of the README compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
