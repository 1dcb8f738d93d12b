//! Hyperparameters of a run, and their defaults for each model size.

use crate::learning_rate::{LrSchedule, LrScheduler};

/// Hyperparameters of a run: the arguments, with defaults for those that are not given.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Number of batches whose gradients are added up to one update.
    pub update_freq: usize,
    /// Word pieces in a sample.
    pub tokens_per_sample: usize,
    /// Samples in a batch, per rank.
    pub batch_size: usize,
    /// Peak learning rate.
    pub lr: f64,
    /// How the learning rate falls after the warm-up.
    pub lr_scheduler: LrScheduler,
    /// Number of updates in which the learning rate rises.
    pub warmup_updates: usize,
    /// Number of updates; `None` for one pass over the text.
    pub max_update: Option<usize>,
    /// Update at which the learning rate reaches 0; `None` for the last one.
    pub total_num_update: Option<usize>,
    /// Upper bound of the 2-norm of all gradients together; 0 for no bound.
    pub clip_norm: f64,
    /// AdamW's weight decay, applied to matrices only.
    pub weight_decay: f32,
    /// AdamW's betas.
    pub adam_betas: (f32, f32),
    /// Dropout probability.
    pub dropout: f64,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Number of updates between two log lines.
    pub log_interval: usize,
    /// Maximum number of batches per rank in the evaluation.
    pub max_valid_steps: usize,
}

/// Defaults that depend on the size of the model.
pub struct Defaults {
    /// Word pieces in a sample.
    pub tokens_per_sample: usize,
    /// Samples in a batch, per rank.
    pub batch_size: usize,
    /// Peak learning rate.
    pub lr: f64,
    /// Number of updates in which the learning rate rises.
    pub warmup_updates: usize,
    /// Number of updates; `None` for one pass over the text.
    pub max_update: Option<usize>,
}

/// Defaults of the tiny model. A run takes two minutes on two CPU cores.
pub const TINY: Defaults = Defaults {
    tokens_per_sample: 128,
    batch_size: 4,
    lr: 4e-3,
    warmup_updates: 100,
    max_update: Some(1500),
};
/// Defaults of the GPT-3 sizes, from fairseq's example.
pub const GPT3: Defaults = Defaults {
    tokens_per_sample: 2048,
    batch_size: 8,
    lr: 1e-4,
    warmup_updates: 5,
    max_update: None,
};

impl Recipe {
    /// Returns the number of updates of a run whose epochs have `per_epoch` updates each.
    pub fn updates(&self, per_epoch: usize) -> usize {
        self.max_update.unwrap_or(per_epoch)
    }

    /// Returns the learning rates of a run of `updates` updates. A run shorter than its warm-up
    /// does not reach the peak.
    pub fn schedule(&self, updates: usize) -> LrSchedule {
        LrSchedule {
            scheduler: self.lr_scheduler,
            lr: self.lr,
            warmup: self.warmup_updates,
            total: self.total_num_update.unwrap_or(updates),
        }
    }

    /// Returns the upper bound of the gradients' norm: infinity for a `clip_norm` of 0.
    pub fn max_norm(&self) -> f64 {
        if self.clip_norm > 0.0 { self.clip_norm } else { f64::INFINITY }
    }
}
