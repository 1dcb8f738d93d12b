//! Steps of a training loop that do not depend on the model.

use anyhow::Result;
use burn::module::ParamGroup;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;

/// Builds AdamW with weight decay on matrices only, not on biases and norms.
pub fn adamw(config: AdamWConfig) -> ModuleOptimizer {
    let vectors = ParamGroup::from_any_predicates(vec![".bias", ".gamma", ".beta"]);
    let optimizer = config.init();
    let without_decay = config.with_weight_decay(0.0).build().with_foreach(true);
    optimizer.with_group(vectors, without_decay, None)
}

/// Returns the number of steps of a run whose epochs have `per_epoch` steps each: the smaller of both
/// limits, or one epoch without any.
#[allow(dead_code, reason = "`mnist` and `gpt_pretrain` have limits of their own")]
pub fn total_steps(epochs: Option<usize>, steps: Option<usize>, per_epoch: usize) -> usize {
    let in_epochs = epochs.map(|epochs| epochs.saturating_mul(per_epoch));
    match (in_epochs, steps) {
        (Some(in_epochs), Some(steps)) => in_epochs.min(steps),
        (in_epochs, steps) => in_epochs.or(steps).unwrap_or(per_epoch),
    }
}

/// Multiplies the loss by the loss scale, if there is one.
pub fn scale_loss(loss: Tensor<1>, scaler: Option<&GradScaler>) -> Tensor<1> {
    match scaler {
        Some(scaler) => scaler.scale(loss),
        None => loss,
    }
}

/// Divides the gradients by the loss scale, if there is one, and updates the scale. Without a scale
/// the gradients are returned unchecked.
///
/// # Errors
///
/// If a peer fails.
pub fn unscale_gradients<M: FsdpModule>(
    model: &Fsdp<M>,
    gradients: GradientsParams,
    scaler: Option<&mut GradScaler>,
) -> Result<Unscaled> {
    match scaler {
        Some(scaler) => Ok(scaler.unscale(model, gradients)?),
        None => Ok(Unscaled::Finite(gradients)),
    }
}

/// Reads a loss from the device.
///
/// # Errors
///
/// If the device fails.
pub fn read_loss(loss: Tensor<1>) -> Result<f64> {
    Ok(f64::from(loss.try_into_scalar::<f32>()?))
}

/// Replaces each rank's losses by their mean over ranks, with one all-reduce.
///
/// # Errors
///
/// If a peer fails.
#[allow(dead_code, reason = "`llm_finetune` weighs ranks by tokens")]
pub fn mean_over_ranks(losses: &mut [f64], worker: &Worker) -> Result<()> {
    worker.all_reduce_sum(losses)?;
    losses.iter_mut().for_each(|loss| *loss /= worker.world().size() as f64);
    Ok(())
}

/// Returns the random numbers that shuffle the examples of one epoch, the same on every rank.
#[allow(dead_code, reason = "`llm_finetune` has an order of its own")]
pub fn epoch_rng(seed: u64, epoch: usize) -> StdRng {
    // The odd factor separates seeds from epochs: seed 1 in epoch 0 differs from seed 0 in epoch 1.
    let epoch = (epoch as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    StdRng::seed_from_u64(seed ^ epoch)
}

/// Returns the median: the middle value, or the mean of the middle two. Returns 0 for no values.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        len => (sorted[(len - 1) / 2] + sorted[len / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!((median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0])), (2.0, 2.5));
        assert_eq!(median(&[]), 0.0);
    }
}
