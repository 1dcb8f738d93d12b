//! Burn's `Learner` on a sharded model.
//!
//! A run at any number of ranks has the losses and metrics of Burn's single-device `Learner` on the
//! batches of all ranks together.

#[path = "../support/mod.rs"]
mod support;

mod dashboard;
mod killed;
mod mean_loss;
mod mnist;
mod model;
mod outputs;
mod parity;
mod refused;
mod resume;
mod run;
mod stop;
