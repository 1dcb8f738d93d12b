//! Scalings of the frequencies of rotary positions, with the names and values of Hugging Face transformers.

use serde::{Deserialize, Serialize};

/// Scaling of rotary frequencies, for texts longer than those that a model was first trained on.
///
/// It has the fields of `rope_scaling` (`rope_parameters` since version 5) in a Hugging Face `config.json`,
/// and deserializes from that object; other fields are ignored. Files before 2024 call the field
/// `rope_type` `type`.
///
/// The formulas are those of transformers' `modeling_rope_utils.py`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
#[non_exhaustive]
pub enum RotaryScaling {
    /// Divides every frequency by `factor`. Source: Chen and others, [*Extending Context Window of Large Language
    /// Models via Positional Interpolation*](https://arxiv.org/abs/2306.15595), 2023.
    Linear {
        /// Number that frequencies are divided by.
        factor: f64,
    },
    /// Divides low frequencies by `factor`, leaves high ones, and interpolates in between. Source: the models
    /// Llama 3.1 to 3.3.
    Llama3 {
        /// Number that low frequencies are divided by.
        factor: f64,
        /// A frequency is low with at most this many turns in `original_max_position_embeddings` positions.
        low_freq_factor: f64,
        /// A frequency is high with at least this many turns.
        high_freq_factor: f64,
        /// Number of positions that the model was first trained on.
        original_max_position_embeddings: usize,
    },
    /// Interpolates by the number of turns, and multiplies cosines and sines by a factor.
    Yarn(YarnScaling),
}

/// Scaling of YaRN: divides low frequencies by `factor`, leaves high ones, and interpolates in between by
/// their index. Cosines and sines are multiplied by the attention factor. Source: Peng and others, [*YaRN:
/// Efficient Context Window Extension of Large Language Models*](https://arxiv.org/abs/2309.00071), 2023.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct YarnScaling {
    /// Number that low frequencies are divided by.
    pub factor: f64,
    /// Number of positions that the model was first trained on.
    pub original_max_position_embeddings: usize,
    /// A frequency is high with at least this many turns in the original positions. Default: 32.
    #[serde(default = "beta_fast")]
    pub beta_fast: f64,
    /// A frequency is low with at most this many turns. Default: 1.
    #[serde(default = "beta_slow")]
    pub beta_slow: f64,
    /// Factor of cosines and sines. Default: `0.1 · ln(factor) + 1`, or by `mscale`.
    #[serde(default)]
    pub attention_factor: Option<f64>,
    /// With `mscale_all_dim`, the attention factor is `(0.1 · mscale · ln(factor) + 1) / (0.1 · mscale_all_dim ·
    /// ln(factor) + 1)`. Default: none.
    #[serde(default)]
    pub mscale: Option<f64>,
    /// See `mscale`. Default: none.
    #[serde(default)]
    pub mscale_all_dim: Option<f64>,
    /// Whether the range of interpolated indices is widened to whole numbers. Default: true.
    #[serde(default = "truncate")]
    pub truncate: bool,
}

fn beta_fast() -> f64 {
    32.0
}

fn beta_slow() -> f64 {
    1.0
}

fn truncate() -> bool {
    true
}

impl YarnScaling {
    /// Returns the scaling with the defaults of its other fields.
    pub fn new(factor: f64, original_max_position_embeddings: usize) -> Self {
        Self {
            factor,
            original_max_position_embeddings,
            beta_fast: beta_fast(),
            beta_slow: beta_slow(),
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
            truncate: truncate(),
        }
    }

    /// Sets the numbers of turns from which on a frequency is high, and up to which it is low.
    #[must_use]
    pub fn with_betas(mut self, fast: f64, slow: f64) -> Self {
        (self.beta_fast, self.beta_slow) = (fast, slow);
        self
    }

    /// Sets the factor of cosines and sines.
    #[must_use]
    pub fn with_attention_factor(mut self, factor: f64) -> Self {
        self.attention_factor = Some(factor);
        self
    }

    /// Sets `mscale` and `mscale_all_dim`, from which the attention factor is computed if it is not set.
    #[must_use]
    pub fn with_mscale(mut self, mscale: f64, mscale_all_dim: f64) -> Self {
        (self.mscale, self.mscale_all_dim) = (Some(mscale), Some(mscale_all_dim));
        self
    }

    /// Sets whether the range of interpolated indices is widened to whole numbers.
    #[must_use]
    pub fn with_truncate(mut self, truncate: bool) -> Self {
        self.truncate = truncate;
        self
    }

    /// Returns the factor of cosines and sines.
    fn attention(&self) -> f64 {
        let by = |mscale: f64| match self.factor <= 1.0 {
            true => 1.0,
            false => 0.1 * mscale * self.factor.ln() + 1.0,
        };
        match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(factor), ..) => factor,
            // transformers takes 0 for not set.
            (None, Some(mscale), Some(all)) if mscale != 0.0 && all != 0.0 => by(mscale) / by(all),
            _ => by(1.0),
        }
    }

    /// Scales the frequencies of heads of width `2 · frequencies.len()`.
    fn scale(&self, frequencies: &mut [f64], theta: f64) {
        let width = (2 * frequencies.len()) as f64;
        let positions = self.original_max_position_embeddings as f64;
        // Index of the frequency with this many turns in the original positions.
        let index = |turns: f64| {
            width * (positions / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (index(self.beta_fast), index(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(width - 1.0));
        if low == high {
            high += 0.001;
        }
        for (at, frequency) in frequencies.iter_mut().enumerate() {
            let interpolated = ((at as f64 - low) / (high - low)).clamp(0.0, 1.0);
            *frequency *= interpolated / self.factor + (1.0 - interpolated);
        }
    }
}

impl RotaryScaling {
    /// Scales frequencies in radians a position, and returns the factor of cosines and sines.
    pub(super) fn apply(&self, frequencies: &mut [f64], theta: f64) -> f64 {
        match self {
            Self::Linear { factor } => {
                frequencies.iter_mut().for_each(|frequency| *frequency /= factor);
                1.0
            }
            &Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: positions,
            } => {
                for frequency in frequencies {
                    let turns = positions as f64 * *frequency / std::f64::consts::TAU;
                    let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    *frequency *= (1.0 - kept) / factor + kept;
                }
                1.0
            }
            Self::Yarn(yarn) => {
                yarn.scale(frequencies, theta);
                yarn.attention()
            }
        }
    }

    /// Panics if a number is out of its range.
    pub(super) fn check(&self, theta: f64) {
        let positive = |name: &str, number: f64| {
            assert!(
                number.is_finite() && number > 0.0,
                "`{name}` of the rotary scaling must be a positive number, and is {number}"
            );
        };
        let (&factor, positions) = match self {
            Self::Linear { factor } => (factor, None),
            Self::Llama3 { factor, original_max_position_embeddings, .. } => {
                (factor, Some(original_max_position_embeddings))
            }
            Self::Yarn(yarn) => (&yarn.factor, Some(&yarn.original_max_position_embeddings)),
        };
        positive("factor", factor);
        if let Some(&positions) = positions {
            positive("original_max_position_embeddings", positions as f64);
        }
        match self {
            Self::Linear { .. } => {}
            &Self::Llama3 { low_freq_factor: low, high_freq_factor: high, .. } => {
                positive("low_freq_factor", low);
                positive("high_freq_factor", high);
                assert!(
                    low < high,
                    "`low_freq_factor` must be below `high_freq_factor`, and {low} is not below {high}"
                );
            }
            Self::Yarn(yarn) => {
                let (fast, slow) = (yarn.beta_fast, yarn.beta_slow);
                positive("beta_fast", fast);
                positive("beta_slow", slow);
                assert!(
                    slow < fast,
                    "`beta_slow` must be below `beta_fast`, and {slow} is not below {fast}"
                );
                positive("attention_factor", yarn.attention());
                assert!(theta > 1.0, "YaRN needs a `theta` above 1, and {theta} is not");
            }
        }
    }
}
