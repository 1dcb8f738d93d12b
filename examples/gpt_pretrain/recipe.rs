//! Hyperparameters of a run, and their defaults for each model size.

use crate::learning_rate::{LrSchedule, LrScheduler};

/// Hyperparameters of a run: the arguments, with defaults for those that are not given.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Number of batches whose gradients are added up to one update, in each epoch. The last number
    /// holds for all further epochs.
    pub update_freq: Vec<usize>,
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
    /// Maximum number of updates.
    pub max_update: Option<usize>,
    /// Maximum number of epochs.
    pub max_epoch: Option<usize>,
    /// Update at which the learning rate reaches 0; `None` for the last one.
    pub total_num_update: Option<usize>,
    /// Upper bound of the 2-norm of all gradients together; 0 for no bound.
    pub clip_norm: f64,
    /// AdamW's weight decay, applied to matrices only.
    pub weight_decay: f32,
    /// AdamW's betas.
    pub adam_betas: (f32, f32),
    /// AdamW's epsilon.
    pub adam_eps: f32,
    /// Dropout probability.
    pub dropout: f64,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Number of updates between two log lines.
    pub log_interval: usize,
    /// Number of epochs between two evaluations. The end of the run is evaluated in any case.
    pub validate_interval: usize,
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
    /// Maximum number of updates.
    pub max_update: Option<usize>,
    /// Upper bound of the 2-norm of all gradients together; 0 for no bound.
    pub clip_norm: f64,
    /// AdamW's weight decay.
    pub weight_decay: f64,
    /// AdamW's betas.
    pub adam_betas: (f32, f32),
    /// Number of updates between two log lines.
    pub log_interval: usize,
}

/// Defaults of the tiny model. A run takes two minutes on two CPU cores.
pub const TINY: Defaults = Defaults {
    tokens_per_sample: 128,
    batch_size: 4,
    lr: 4e-3,
    warmup_updates: 100,
    max_update: Some(1500),
    clip_norm: 1.0,
    weight_decay: 0.1,
    adam_betas: (0.9, 0.98),
    log_interval: 20,
};
/// Defaults of the GPT-3 sizes: fairseq's, but for the learning rate, the batch size and the length of
/// a sample, which are those of fairseq's example. fairseq's default rate of 0.25 suits no GPT, and it
/// has no default batch size.
pub const GPT3: Defaults = Defaults {
    tokens_per_sample: 2048,
    batch_size: 8,
    lr: 1e-4,
    warmup_updates: 0,
    max_update: None,
    clip_norm: 0.0,
    weight_decay: 0.0,
    adam_betas: (0.9, 0.999),
    log_interval: 100,
};

impl Recipe {
    /// Returns the number of batches in an update of an epoch, counted from 0.
    pub fn update_freq(&self, epoch: usize) -> usize {
        self.update_freq.get(epoch).or(self.update_freq.last()).copied().unwrap_or(1)
    }

    /// Returns the number of updates of a run whose epochs have `per_epoch` updates. Without a
    /// maximum, the run has one epoch.
    pub fn updates(&self, per_epoch: impl Fn(usize) -> usize) -> usize {
        let epochs = match (self.max_epoch, self.max_update) {
            (None, Some(updates)) => return updates,
            (epochs, _) => epochs.unwrap_or(1),
        };
        // After the list of frequencies, all epochs have the same number.
        let listed = self.update_freq.len().min(epochs);
        let first: usize = (0..listed).map(&per_epoch).sum();
        let rest = (epochs - listed).saturating_mul(per_epoch(epochs));
        first.saturating_add(rest).min(self.max_update.unwrap_or(usize::MAX))
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::cli::Cli;

    #[test]
    fn epochs_and_updates_both_end_a_run() {
        let updates = |flags: &str| {
            let flags = ["gpt_pretrain", "--arch", "small"].into_iter().chain(flags.split(' '));
            let recipe = Cli::parse_from(flags).recipe();
            recipe.updates(|epoch| 100 / recipe.update_freq(epoch))
        };
        assert_eq!(updates("--seed 1"), 100, "one epoch");
        assert_eq!(updates("--max-update 230"), 230);
        assert_eq!(updates("--max-epoch 3"), 300);
        assert_eq!(updates("--max-epoch 3 --max-update 230"), 230);
        assert_eq!(updates("--max-epoch 5 --update-freq 4,2,1"), 25 + 50 + 300);
        assert_eq!(updates("--max-epoch 2 --update-freq 4,2,1"), 25 + 50);
    }
}
