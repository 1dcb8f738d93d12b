//! Burn's [`Learner`](burn::train::Learner) on a sharded model.
//!
//! The model keeps its [`TrainStep`](burn::train::TrainStep) and
//! [`InferenceStep`](burn::train::InferenceStep), with a plain `loss.backward()`; [`Fsdp`](crate::Fsdp)
//! implements both by way of the model. Three parts replace those of Burn:
//!
//! - [`RankLoader`] in place of Burn's `DataLoaderBuilder`: each rank loads its own part of the data.
//! - [`supervised`] in place of `SupervisedTraining::new`: only rank 0 shows a dashboard and writes
//!   metrics.
//! - [`FsdpStrategy`] as the training strategy: metrics over all ranks, clipping by the norm of all
//!   gradients, checkpoints, and one decision for all ranks when to stop.
//!
//! # Example
//!
//! ```no_run
//! # use burn::data::dataloader::batcher::Batcher;
//! # use burn::data::dataset::InMemDataset;
//! # use burn::module::Module;
//! # use burn::nn::{Linear, LinearConfig, loss::MseLoss, loss::Reduction};
//! # use burn::tensor::{Device, Tensor};
//! use burn::train::metric::LossMetric;
//! use burn::train::{InferenceStep, Learner, RegressionOutput, TrainOutput, TrainStep};
//! use fsdp_runtime::checkpoint::CheckpointManager;
//! use fsdp_runtime::optim::AdamWConfig;
//! use fsdp_runtime::prelude::*;
//! use fsdp_runtime::train::{FsdpStrategy, RankLoader, supervised};
//!
//! #[derive(Module, Debug)]
//! #[fsdp_unit(root)]
//! struct Net {
//!     layer: Linear,
//! }
//!
//! #[fsdp_unit]
//! impl Net {
//!     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
//!         self.layer.forward(x)
//!     }
//! }
//! # impl Net {
//! #     fn output(&self, (x, y): (Tensor<2>, Tensor<2>)) -> RegressionOutput {
//! #         let output = self.forward(x);
//! #         let loss = MseLoss::new().forward(output.clone(), y.clone(), Reduction::Mean);
//! #         RegressionOutput::new(loss, output, y)
//! #     }
//! # }
//!
//! impl TrainStep for Net {
//!     type Input = (Tensor<2>, Tensor<2>);
//!     type Output = RegressionOutput;
//!
//!     fn step(&self, item: Self::Input) -> TrainOutput<RegressionOutput> {
//!         let item = self.output(item);
//!         TrainOutput::new(self, item.loss.backward(), item)
//!     }
//! }
//! # impl InferenceStep for Net {
//! #     type Input = (Tensor<2>, Tensor<2>);
//! #     type Output = RegressionOutput;
//! #     fn step(&self, item: Self::Input) -> RegressionOutput {
//! #         self.output(item)
//! #     }
//! # }
//! # #[derive(Clone)]
//! # struct Pairs;
//! # impl Batcher<f32, (Tensor<2>, Tensor<2>)> for Pairs {
//! #     fn batch(&self, items: Vec<f32>, device: &Device) -> (Tensor<2>, Tensor<2>) {
//! #         let n = items.len();
//! #         let x = Tensor::<1>::from_floats(items.as_slice(), device).reshape([n, 1]);
//! #         (x.clone(), x)
//! #     }
//! # }
//!
//! # fn main() -> Result<(), fsdp_runtime::LaunchError> {
//! # let items = || InMemDataset::new((0..64).map(|i| i as f32).collect());
//! launch(LaunchOptions::new(2), move |worker| {
//!     let train = RankLoader::new(Pairs, items(), &worker).batch_size(4).shuffle(42).build();
//!     let valid = RankLoader::new(Pairs, items(), &worker).batch_size(4).build();
//!     let net = Net { layer: LinearConfig::new(1, 1).init(worker.device()) };
//!     let model = fully_shard(net, &worker, FsdpOptions::new())?;
//!     let checkpoints = CheckpointManager::new("run/checkpoints", &worker).with_keep_last(2);
//!     let training = supervised(&worker, "run", train, valid)
//!         .metrics((LossMetric::new(),))
//!         .num_epochs(2)
//!         .with_training_strategy(
//!             FsdpStrategy::new(&worker)
//!                 .clip_grad_norm(1.0)
//!                 .checkpoints(checkpoints)
//!                 .resume_latest()
//!                 .into(),
//!         );
//!     let result = training.launch(Learner::new(model, AdamWConfig::new().init(), 1e-3));
//!     result.model.state().save_burnpack("run/model.bpk")
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # What differs from Burn's strategies
//!
//! - A batch of the loader is one rank's batch. Gradients are averaged over ranks, and with
//!   `grads_accumulation` they are the sum over micro-batches, as Burn has it.
//! - Burn's checkpointers and `checkpoint(epoch)` are errors: use [`FsdpStrategy::checkpoints`] and
//!   [`FsdpStrategy::resume_latest`].
//! - An optimizer that clips by norm is an error: use [`FsdpStrategy::clip_grad_norm`].
//! - `gradient_checkpointing()` has no effect, as with all custom strategies; use
//!   [`FsdpOptions::with_activation_checkpointing`](crate::FsdpOptions::with_activation_checkpointing).
//! - Burn's own data loaders give every rank all of the data. Give each rank its own part of the
//!   dataset where you use them.
//!
//! Imports point one way: output, permutation, position, prefetch, handover, silent, events <- loader,
//! steps, supervised, turn <- seen, checkpoints <- settings <- fit <- strategy.

mod checkpoints;
mod events;
mod fit;
mod handover;
mod loader;
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
pub use self::output::RankOutput;
pub use self::strategy::FsdpStrategy;
pub use self::supervised::supervised;
