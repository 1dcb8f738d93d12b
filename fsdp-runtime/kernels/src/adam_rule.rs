//! The update rule of Adam and AdamW, as numbers.

use super::update_rules::AdamStep;

/// The hyperparameters of Adam and AdamW.
#[derive(Clone, Copy, Debug)]
pub struct AdamRule {
    /// β₁, decay of the first moment, in `[0, 1)`.
    pub beta_1: f32,
    /// β₂, decay of the second moment, in `[0, 1)`.
    pub beta_2: f32,
    /// ε, added to the denominator.
    pub epsilon: f32,
    /// Whether the denominator has the largest second moment so far.
    pub amsgrad: bool,
    /// Weight decay.
    pub decay: Decay,
}

/// Form of weight decay, with its strength.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// Adds `penalty` times the parameter to the gradient (an L2 penalty), as Adam does.
    Coupled {
        /// λ, the factor of the parameter.
        penalty: f32,
    },
    /// Shrinks the parameter by `lr · rate` of its value, as AdamW does. With `cautious`, only
    /// elements with the sign of the first moment shrink.
    Decoupled {
        /// λ, the factor of the learning rate.
        rate: f32,
        /// Whether only elements with the sign of the first moment shrink.
        cautious: bool,
    },
}

impl AdamRule {
    /// Returns the numbers of step `time`, counted from 1. As in PyTorch, they are computed in f64
    /// and rounded once.
    pub fn step(&self, lr: f64, time: usize) -> AdamStep {
        let [beta_1, beta_2] = [self.beta_1, self.beta_2].map(f64::from);
        let time = i32::try_from(time).unwrap_or(i32::MAX);
        let correction = |beta: f64| 1.0 - beta.powi(time);
        let (penalty, rate, cautious) = match self.decay {
            Decay::Coupled { penalty } => (penalty, 0.0, false),
            Decay::Decoupled { rate, cautious } => (0.0, lr * f64::from(rate), cautious),
        };
        AdamStep {
            beta_1: self.beta_1,
            one_minus_beta_1: (1.0 - beta_1) as f32,
            beta_2: self.beta_2,
            one_minus_beta_2: (1.0 - beta_2) as f32,
            epsilon: self.epsilon,
            root_scale: correction(beta_2).sqrt().recip() as f32,
            step_size: (lr / correction(beta_1)) as f32,
            penalty,
            keep: (1.0 - rate) as f32,
            rate: rate as f32,
            cautious,
        }
    }
}
