//! The activation of a linear layer, after the product and its bias.

use serde::{Deserialize, Serialize};

/// Function that a linear layer applies to its result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LinearActivation {
    /// The result itself.
    #[default]
    Identity,
    /// The exact GELU, `x · Φ(x)`, where Φ is the standard normal distribution.
    Gelu,
    /// The tanh approximation of the GELU, `x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`, as in GPT-2.
    /// Source: Hendrycks and Gimpel, [*Gaussian Error Linear Units*](https://arxiv.org/abs/1606.08415), 2016.
    GeluTanh,
    /// The rectified linear unit, `max(x, 0)`.
    Relu,
    /// The SiLU, or Swish: `x / (1 + e⁻ˣ)`.
    Silu,
}

/// Factor of x³ in the tanh approximation of the GELU.
pub(crate) const GELU_CUBE: f32 = 0.044_715;
/// √(8/π). The tanh approximation is `x · σ(√(8/π) · (x + 0.044715 x³))`, where σ is the logistic function.
pub(crate) const GELU_SLOPE: f32 = 1.595_769;
