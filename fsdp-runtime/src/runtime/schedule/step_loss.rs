//! What the losses of a step are: means, or sums with their weights.
//!
//! [Note: the mean over tokens] The gradient of a step of sums is that of all sums divided by all weights,
//! and the last of these weights is known only with the last micro-batch. Backward runs from each sum
//! times ranks / `assumed`, where `assumed` is the weight of the step's first micro-batch over all ranks.
//! So gradients have the size of a mean's while they are in half precision, and the reduction divides by
//! the number of ranks, as it does for means. Once all weights are known, gradients are multiplied by
//! `assumed` / `total`: a factor of 1 in a step of one micro-batch.

use crate::error::ScheduleError;

/// What the losses of the present step are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum StepLoss {
    /// Each loss is a mean of its own, and gradients are averaged over ranks.
    Mean,
    /// Each loss is a sum with a weight.
    Sum(SumStep),
}

/// The weights of a step of sums.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SumStep {
    /// Weight of the first micro-batch over all ranks, or 1 if that is 0.
    assumed: f64,
    /// Weight of this rank's micro-batches so far.
    own: f64,
    /// Weight of all micro-batches over all ranks, once the last one has begun.
    total: Option<f64>,
}

impl SumStep {
    /// Adds the weight of a micro-batch to `earlier`, those of the same step before it. `is_last` says
    /// that no other one follows. `over_ranks` returns the sum of a weight over all ranks; every rank
    /// calls it for the same micro-batches.
    pub(super) fn add<E: From<ScheduleError>>(
        earlier: Option<Self>,
        weight: f64,
        is_last: bool,
        over_ranks: impl FnOnce(f64) -> Result<f64, E>,
    ) -> Result<Self, E> {
        // `-0.0` is 0.
        if !(weight.is_finite() && weight >= 0.0) {
            return Err(ScheduleError::InvalidWeight { weight }.into());
        }
        let own = earlier.map_or(0.0, |step| step.own) + weight;
        if let (Some(step), false) = (earlier, is_last) {
            return Ok(Self { own, ..step });
        }
        let sum = over_ranks(own)?;
        if is_last && sum == 0.0 {
            return Err(ScheduleError::NoWeight.into());
        }
        let first = if sum > 0.0 { sum } else { 1.0 };
        let assumed = earlier.map_or(first, |step| step.assumed);
        let step = Self { assumed, own, total: is_last.then_some(sum) };
        // A factor that overflows or vanishes in f32 would make every gradient infinite or 0.
        let is_usable = |factor: f64| (factor as f32).is_normal();
        match is_usable(step.loss_factor(1)) && step.gradient_factor().is_none_or(is_usable) {
            true => Ok(step),
            false => Err(ScheduleError::InvalidWeight { weight: sum }.into()),
        }
    }

    /// Returns the factor of each sum before backward, in a world of `world` ranks.
    pub(super) fn loss_factor(&self, world: usize) -> f64 {
        world as f64 / self.assumed
    }

    /// Returns the factor of the reduced gradients, if it is not 1.
    pub(super) fn gradient_factor(&self) -> Option<f64> {
        let total = self.total.filter(|total| *total != self.assumed)?;
        Some(self.assumed / total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds micro-batches, of which the last ends the step, in a world whose other ranks have the
    /// weights `others`.
    fn step(weights: &[f64], others: &[f64]) -> Result<SumStep, ScheduleError> {
        let mut step = None;
        for (at, weight) in weights.iter().enumerate() {
            let others: f64 = others[..=at].iter().sum();
            let is_last = at + 1 == weights.len();
            let over_ranks = |own| Ok::<_, ScheduleError>(own + others);
            step = Some(SumStep::add(step, *weight, is_last, over_ranks)?);
        }
        Ok(step.expect("there are weights"))
    }

    #[test]
    fn the_factors_divide_by_the_weight_of_all_micro_batches_and_ranks() {
        let one = step(&[3.0], &[5.0]).unwrap();
        assert_eq!((one.loss_factor(2), one.gradient_factor()), (0.25, None));
        let three = step(&[3.0, 0.0, 4.0], &[5.0, 1.0, 3.0]).unwrap();
        assert_eq!((three.loss_factor(2), three.gradient_factor()), (0.25, Some(0.5)));
        let late = step(&[0.0, 0.0, 4.0], &[0.0, 0.0, 0.0]).unwrap();
        assert_eq!((late.loss_factor(2), late.gradient_factor()), (2.0, Some(0.25)));
    }

    #[test]
    fn ranks_exchange_weights_in_the_first_and_the_last_micro_batch() {
        let mut calls = Vec::new();
        let mut step = None;
        for at in 0..4 {
            let over_ranks = |own| {
                calls.push(at);
                Ok::<_, ScheduleError>(own)
            };
            step = Some(SumStep::add(step, 1.0, at == 3, over_ranks).unwrap());
        }
        assert_eq!(calls, [0, 3]);
    }

    #[test]
    fn weights_without_a_mean_are_errors() {
        for weight in [-1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let error = step(&[1.0, weight], &[1.0, 1.0]).unwrap_err();
            assert!(matches!(error, ScheduleError::InvalidWeight { .. }), "{error}");
            assert!(error.to_string().contains(&weight.to_string()), "{error}");
        }
        for weight in [1e-300, 1e300, f64::MAX] {
            let error = step(&[weight], &[weight]).unwrap_err();
            assert!(matches!(error, ScheduleError::InvalidWeight { .. }), "{error}");
        }
        let error = step(&[0.0, -0.0], &[0.0, 0.0]).unwrap_err();
        assert_eq!(error, ScheduleError::NoWeight);
    }
}
