//! fairseq's learning rate schedules.
//!
//! The learning rate is a function of the number of completed updates. The n-th update uses the
//! rate after n − 1 updates, as in fairseq. Therefore the first update has a rate of 0 if there is
//! a warm-up, and the log line of an update shows the rate of the next one.

use std::f64::consts::PI;
use std::str::FromStr;

/// How the learning rate falls after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LrScheduler {
    /// Linear to 0: fairseq's polynomial decay with a power of 1.
    PolynomialDecay,
    /// Half a period of a cosine, to 0.
    Cosine,
    /// Inversely proportional to the square root of the number of updates.
    InverseSqrt,
}

impl FromStr for LrScheduler {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "polynomial_decay" => Ok(Self::PolynomialDecay),
            "cosine" => Ok(Self::Cosine),
            "inverse_sqrt" => Ok(Self::InverseSqrt),
            _ => Err("expected polynomial_decay, cosine or inverse_sqrt".into()),
        }
    }
}

/// Learning rate schedule of a run.
#[derive(Clone, Copy, Debug)]
pub struct LrSchedule {
    /// How the rate falls after the warm-up.
    pub scheduler: LrScheduler,
    /// Peak learning rate.
    pub lr: f64,
    /// Number of updates in which the rate rises linearly from 0.
    pub warmup: usize,
    /// Update at which the rate reaches 0. `inverse_sqrt` does not use it.
    pub total: usize,
}

impl LrSchedule {
    /// Returns the rate after `updates` updates.
    pub fn rate(&self, updates: usize) -> f64 {
        let Self { lr, warmup, total, .. } = *self;
        if updates < warmup {
            return lr * updates as f64 / warmup as f64;
        }
        let part = |from: usize| (updates - warmup) as f64 / (from - warmup) as f64;
        match self.scheduler {
            LrScheduler::InverseSqrt => {
                lr * (warmup.max(1) as f64).sqrt() / (updates.max(1) as f64).sqrt()
            }
            _ if updates == warmup => lr,
            _ if updates >= total => 0.0,
            LrScheduler::PolynomialDecay => lr * (1.0 - part(total)),
            LrScheduler::Cosine => lr * 0.5 * (1.0 + (PI * part(total)).cos()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(scheduler: LrScheduler, updates: &[usize]) -> Vec<f64> {
        let schedule = LrSchedule { scheduler, lr: 1e-4, warmup: 5, total: 10 };
        updates.iter().map(|updates| schedule.rate(*updates)).collect()
    }

    fn close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-12, "{found} {expected}");
        }
    }

    /// The expected values are the `lr` of the ten log lines in fairseq's README.
    #[test]
    fn polynomial_decay_is_fairseqs_example() {
        let expected = [2e-5, 4e-5, 6e-5, 8e-5, 1e-4, 8e-5, 6e-5, 4e-5, 2e-5, 0.0];
        let updates: Vec<usize> = (1..=10).collect();
        close(&rates(LrScheduler::PolynomialDecay, &updates), &expected);
        assert_eq!(rates(LrScheduler::PolynomialDecay, &[0, 11]), [0.0, 0.0]);
    }

    /// fairseq's formulas are `0.5 * lr * (1 + cos(pi * t / period))`, and
    /// `lr * warmup ** 0.5 * num_updates ** -0.5`.
    #[test]
    fn the_other_two_are_fairseqs_formulas() {
        let cosine = |t: f64| 0.5e-4 * (1.0 + (PI * t / 5.0).cos());
        close(
            &rates(LrScheduler::Cosine, &[0, 3, 5, 7, 9, 10]),
            &[0.0, 6e-5, 1e-4, cosine(2.0), cosine(4.0), 0.0],
        );
        let inverse = |n: f64| 1e-4 * 5f64.powf(0.5) * n.powf(-0.5);
        close(
            &rates(LrScheduler::InverseSqrt, &[0, 4, 5, 20, 500]),
            &[0.0, 8e-5, 1e-4, inverse(20.0), inverse(500.0)],
        );
    }

    #[test]
    fn without_warm_up_the_first_rate_is_the_peak() {
        for scheduler in
            [LrScheduler::PolynomialDecay, LrScheduler::Cosine, LrScheduler::InverseSqrt]
        {
            let schedule = LrSchedule { scheduler, lr: 0.5, warmup: 0, total: 4 };
            assert_eq!(schedule.rate(0), 0.5);
            let rates: Vec<f64> = (0..=9).map(|updates| schedule.rate(updates)).collect();
            assert!(rates.iter().all(|rate| (0.0..=0.5).contains(rate)), "{rates:?}");
        }
    }
}
