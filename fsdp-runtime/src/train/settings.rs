//! The settings of a strategy.

use burn::train::{InferenceStep, TrainStep};

use super::checkpoints::Resume;
use crate::module::FsdpModule;

/// A model that Burn's `Learner` can train once it is sharded.
pub(super) trait LearnerModel: FsdpModule + TrainStep + InferenceStep + 'static {}

impl<M: FsdpModule + TrainStep + InferenceStep + 'static> LearnerModel for M {}

/// The options of a strategy, apart from the checkpoint manager.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) max_grad_norm: Option<f64>,
    pub(super) whole_param: bool,
    pub(super) checkpoint_every: Option<u64>,
    pub(super) resume: Resume,
    pub(super) metric_interval: usize,
    /// Whether the program gives each rank its part of the data without a `RankLoader`.
    pub(super) own_data_split: bool,
}
