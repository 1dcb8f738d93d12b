//! Options that say how a model is sharded: PyTorch's and Accelerate's options as types.
//!
//! Imports point one way: table, policies, precision, storage <- fsdp_options <- unit_options, resolve,
//! tables, fsdp_config, config. `table.rs` has a row for each option, from which the others are made.
#![cfg_attr(doc, doc = "\n[A page of the guide](crate::guide::options) is about this module.")]

pub mod config;
mod fsdp_config;
mod fsdp_options;
mod policies;
mod precision;
mod resolve;
mod storage;
mod table;
mod tables;
mod unit_options;

pub use self::fsdp_config::{CheckpointingConfig, FsdpConfig, WrapConfig};
pub use self::fsdp_options::FsdpOptions;
pub use self::policies::{
    ActivationCheckpointing, BackwardPrefetch, ContextExchange, GradientAccumulation,
    OffloadPolicy, ReshardAfterForward, ShardingStrategy, WrapPolicy,
};
pub use self::precision::MixedPrecisionPolicy;
pub(crate) use self::precision::{Precision, computed};
pub(crate) use self::resolve::{divide_factor, leads_to, resolve_reshard};
pub use self::storage::StoragePolicy;
pub(crate) use self::tables::{TablePlace, TableRules};
pub use crate::layout::StorageType;
pub use crate::module::UnitType;
