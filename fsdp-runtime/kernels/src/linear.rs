//! Linear layers: the activation after a product, and the forms that are made of Burn's operations.

use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, Shape};
use serde::{Deserialize, Serialize};

use crate::tensor::Float;

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

/// Adds `a · b` to a matrix.
pub(crate) fn add_product<B: Backend>(target: Float<B>, [a, b]: [Float<B>; 2]) -> Float<B> {
    B::float_add(target, B::float_matmul(a, b))
}

/// Returns `inputᵀ · grad`, computed in `dtype`.
pub(crate) fn weight_gradient<B: Backend>(
    input: Float<B>,
    grad: Float<B>,
    cast: impl Fn(Float<B>) -> Float<B>,
) -> Float<B> {
    B::float_matmul(B::float_transpose(cast(input)), cast(grad))
}

/// Returns the sums of the columns of a matrix, `[columns]`, in f32 or, for f64, in f64.
pub(crate) fn column_sums<B: Backend>(matrix: Float<B>) -> Float<B> {
    let columns = matrix.shape()[1];
    let wide = if matrix.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let sums = B::float_sum_dim(B::float_cast(matrix, wide.into()), 0);
    B::float_reshape(sums, Shape::from([columns]))
}
