//! Burn's [`Learner`](burn::train::Learner) on a sharded model.
//!
//! The model keeps its [`TrainStep`](burn::train::TrainStep) and
//! [`InferenceStep`](burn::train::InferenceStep), with a plain `loss.backward()`;
//! [`Fsdp`](crate::Fsdp) implements both by way of the model. Three parts replace those of Burn:
//!
//! - [`RankLoader`] in place of Burn's `DataLoaderBuilder`: each rank loads its own part of the
//!   data.
//! - [`supervised`] in place of `SupervisedTraining::new`: only rank 0 shows a dashboard and writes
//!   metrics.
//! - [`FsdpStrategy`] as the training strategy: metrics over all ranks, clipping by the norm of all
//!   gradients, checkpoints, and one decision for all ranks when to stop.
//!
//! The chapter `guide::learner` has a whole program.
//!
//! # What differs from Burn's strategies
//!
//! - A batch of the loader is one rank's batch. Gradients are averaged over ranks, and with
//!   `grads_accumulation` they are the sum over micro-batches, as Burn has it. For a mean over tokens,
//!   of which ranks and micro-batches have different numbers, a step calls [`mean_loss`](mean_loss()).
//! - Burn's checkpointers and `checkpoint(epoch)` are errors: use [`FsdpStrategy::with_checkpoints`] and
//!   [`FsdpStrategy::with_resume_latest`].
//! - An optimizer that clips by norm is an error: use [`FsdpStrategy::with_max_grad_norm`].
//! - `gradient_checkpointing()` has no effect, as with all custom strategies; use
//!   [`FsdpOptions::with_activation_checkpointing`](crate::FsdpOptions::with_activation_checkpointing).
//! - Burn's own data loaders give every rank all of the data, and are an error in training at several
//!   ranks. [`FsdpStrategy::with_own_data_split`] accepts them where each gets its own part.
//!
//! Imports point one way: output, permutation, position, prefetch, handover, mean_loss, silent, events <-
//! loader, steps, supervised, turn <- seen, checkpoints <- settings <- fit <- strategy.
#![cfg_attr(doc, doc = "\n[A page of the guide](crate::guide::learner) is about this module.")]

mod checkpoints;
mod events;
mod fit;
mod handover;
mod loader;
mod mean_loss;
mod output;
mod permutation;
mod position;
mod prefetch;
mod seen;
mod settings;
mod silent;
mod steps;
mod strategy;
mod supervised;
mod turn;

pub use self::loader::RankLoader;
pub use self::mean_loss::mean_loss;
pub use self::output::RankOutput;
pub use self::strategy::FsdpStrategy;
pub use self::supervised::supervised;
