//! Normalization of rows, as layer norm and RMS norm do it: its rule and its tensors.

/// How rows are normalized.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormalizationRule {
    /// Whether a row's mean is subtracted first, as by layer norm. RMS norm does not subtract it.
    pub centered: bool,
    /// Number added to the variance of a row, or to the mean of its squares if it is not centered.
    pub epsilon: f32,
}

/// Tensors of a normalization. They have one dtype.
#[derive(Clone, Debug)]
pub struct NormalizationTensors<T> {
    /// Input `[.., len]`, with at least one element.
    pub input: T,
    /// Tensor of the input's shape. The sum of both is normalized, rounded to the dtype.
    pub residual: Option<T>,
    /// Weight, `[len]`.
    pub gamma: T,
    /// Bias, `[len]`.
    pub beta: Option<T>,
}

/// Results of a normalization.
#[derive(Clone, Debug)]
pub struct Normalized<T> {
    /// Normalized rows, times gamma, plus beta.
    pub output: T,
    /// Sum of input and residual, if there is a residual.
    pub sum: Option<T>,
}

/// Tensors from which the gradients of a normalization are computed. They have one dtype.
#[derive(Clone, Debug)]
pub struct NormalizationGrads<T> {
    /// Rows that were normalized: the input, or its sum with the residual.
    pub input: T,
    /// Weight, `[len]`.
    pub gamma: T,
    /// Gradient of the output.
    pub grad: T,
    /// Gradient of the sum, which is added to that of the input.
    pub sum_grad: Option<T>,
}
