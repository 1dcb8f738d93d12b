//! The sharding of a module, and the sharded model that it returns.
//!
//! Imports point one way: optimizer_probe <- optimizer_check; around_float, list_params <- place_shards,
//! step_in_f32; init, ignored_gradients, gradient_hook, optimizer_check, place_shards, step_in_f32 <- model <-
//! construct, backward, clip, display, stats; backward <- backward_sum, unshard; unshard <- control.

pub(crate) mod around_float;
mod backward;
mod backward_sum;
mod clip;
mod construct;
mod control;
mod display;
mod gradient_hook;
mod ignored_gradients;
mod init;
mod list_params;
mod model;
pub(crate) mod optimizer_check;
pub(crate) mod optimizer_probe;
pub(crate) mod place_shards;
mod stats;
pub(crate) mod step_in_f32;
mod unshard;

pub use self::clip::ClipOptions;
pub use self::construct::fully_shard;
pub(crate) use self::construct::shard;
pub use self::gradient_hook::ReducedGradient;
pub use self::model::Fsdp;
pub use self::stats::Stats;
pub use self::unshard::{UnitHandle, Unsharded};
