//! The initialisation of a sharded model: each parameter is initialised or received, and replaced
//! by the part of it that this rank stores, one after the other.
//!
//! A parameter that another rank initialises, or that is loaded later, is never initialised on this
//! rank. Values that the communication thread receives are put into the model at the end.
//!
//! Imports point one way: broadcasts, init_owners, param_value, running_stats, same_model <-
//! small_params, checks, init_device <- setup <- sharding_init.

mod broadcasts;
mod checks;
mod init_device;
mod init_owners;
mod param_value;
mod running_stats;
mod same_model;
mod setup;
mod sharding_init;
mod small_params;

pub(super) use self::init_device::InitDevice;
pub(super) use self::init_owners::InitOwners;
pub(super) use self::same_model::check_same_model;
pub(super) use self::setup::InitSetup;
pub(super) use self::sharding_init::ShardingInit;
