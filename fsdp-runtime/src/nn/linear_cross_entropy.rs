//! The cross-entropy of a linear layer's output, without the output.

use burn::nn::loss::Reduction;
use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, FloatDType, Int, Tensor};

use crate::backend::ops::{LossInputs, LossRule, linear_cross_entropy_tracked, wide};

/// Logits that exist at once, unless [`LinearCrossEntropyOptions::with_chunk_rows`] says otherwise.
const LOGITS: usize = 1 << 24;
/// Bound on the number of classes: f32 has all whole numbers up to here.
const CLASSES: usize = 1 << 24;

/// Order of the dimensions of a head's weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum WeightLayout {
    /// `[classes, width]`, as the weight of `burn::nn::Embedding`, which a head is often tied to.
    #[default]
    Embedding,
    /// `[width, classes]`, as the weight of `burn::nn::Linear`.
    Linear,
}

/// Options of [`linear_cross_entropy`].
#[derive(Clone, Debug)]
#[must_use]
pub struct LinearCrossEntropyOptions {
    pub(super) layout: WeightLayout,
    pub(super) bias: Option<Tensor<1>>,
    pub(super) ignore_index: Option<i64>,
    pub(super) label_smoothing: f64,
    pub(super) reduction: Reduction,
    chunk_rows: Option<usize>,
}

impl Default for LinearCrossEntropyOptions {
    fn default() -> Self {
        Self {
            layout: WeightLayout::default(),
            bias: None,
            ignore_index: None,
            label_smoothing: 0.0,
            reduction: Reduction::Mean,
            chunk_rows: None,
        }
    }
}

impl LinearCrossEntropyOptions {
    /// Returns the default options: a weight like that of an embedding, no bias, the mean over all rows.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the order of the weight's dimensions. Default: [`WeightLayout::Embedding`].
    pub fn with_layout(mut self, layout: WeightLayout) -> Self {
        self.layout = layout;
        self
    }

    /// Adds a bias of shape `[classes]` to the logits.
    pub fn with_bias(mut self, bias: Tensor<1>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// Excludes rows with this target: they have no loss, no gradient, and no share in the mean. Default:
    /// every row counts.
    pub fn with_ignore_index(mut self, target: i64) -> Self {
        self.ignore_index = Some(target);
        self
    }

    /// Sets the share of the target distribution that is even over all classes, in `[0, 1]`. Default: 0.
    pub fn with_label_smoothing(mut self, share: f64) -> Self {
        self.label_smoothing = share;
        self
    }

    /// Sets how the losses of rows become one number. Default: `Mean`, over the rows that count. `Auto`
    /// means `Mean`, and `BatchMean` divides the sum by the number of all rows.
    pub fn with_reduction(mut self, reduction: Reduction) -> Self {
        self.reduction = reduction;
        self
    }

    /// Sets the number of rows whose logits exist at once. Default: as many as have 2^24 logits (64 MB in
    /// f32, 32 MB in bf16), at least 16. More rows are faster: each chunk adds to the whole gradient of the weight.
    pub fn with_chunk_rows(mut self, rows: usize) -> Self {
        self.chunk_rows = Some(rows);
        self
    }

    /// Returns the number of rows of a chunk; chunks are about equal.
    pub(super) fn chunk(&self, rows: usize, classes: usize) -> usize {
        let most = self.chunk_rows.unwrap_or_else(|| (LOGITS / classes.max(1)).max(16)).max(1);
        rows.div_ceil(rows.div_ceil(most).max(1)).max(1)
    }
}

/// Returns the bytes that [`linear_cross_entropy`] keeps for backward, if hidden values and weight are
/// tracked and there is no bias: their gradients, in f32, or in f64 for tensors of f64. For
/// [`MemoryForecast::with_activations`](crate::memory::MemoryForecast::with_activations).
///
/// `hidden` is the shape `[rows, width]`.
pub fn linear_cross_entropy_bytes(hidden: [usize; 2], classes: usize, dtype: DType) -> usize {
    let [rows, width] = hidden;
    (rows + classes) * width * wide(dtype).size()
}

/// Computes the cross-entropy of the logits `hidden · weightᵀ + bias` and the targets, and never holds
/// all logits.
///
/// The logits of a language model are the largest tensor of its step: one number for each row and each
/// word piece of the vocabulary. Here they exist for a chunk of rows at a time. Their gradient replaces
/// them, and is multiplied out before the next chunk: with the weight, to the gradient of the hidden
/// values, and with the hidden values, which adds to the gradient of the weight. So the gradients are
/// computed in forward, as in Hsu and others, [*Liger Kernel*](https://arxiv.org/abs/2410.10989), 2024, and
/// kept for backward, which multiplies them by the gradient of the loss. That takes three products where
/// a second pass over the logits in backward would take four, and no more memory, since the loss is
/// what backward begins with. Without autodiff no gradients are computed.
///
/// The loss is in f32, or in f64 for tensors of f64; sums and gradients are kept in that dtype. It
/// differs from that of `burn::nn::loss::CrossEntropyLoss` by rounding. With no row that counts the
/// mean is 0, where Burn and PyTorch have NaN.
///
/// Inside of a sharded unit `weight` is `self.head.val()`, and its gradient is reduced as any other.
///
/// There are kernels for f32 on Flex, and for f32, bf16 and f16 on CubeCL devices. Other dtypes compute
/// chunks with Burn's operations. On other devices all logits are made.
///
/// # Shapes
///
/// - hidden: `[rows, width]`
/// - weight: `[classes, width]`, or `[width, classes]` with [`WeightLayout::Linear`]
/// - targets: `[rows]`, each a class from 0 on, or the ignored index
/// - output: `[1]`
///
/// # Panics
///
/// If the shapes do not fit one another, for more than 2^24 classes, and for a share of smoothing outside
/// of `[0, 1]`. On Flex in f32 also for a target that is no class; on other devices such a target gives a
/// wrong loss.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use fsdp_runtime::nn::{LinearCrossEntropyOptions, linear_cross_entropy};
///
/// # fn main() {
/// # #[cfg(feature = "flex")] {
/// let device = Device::flex();
/// let hidden = Tensor::<2>::random([6, 32], Distribution::Default, &device);
/// let embedding = Tensor::<2>::random([1000, 32], Distribution::Default, &device);
/// let targets = Tensor::from_ints([5, 999, 0, -100, 7, 8], &device);
/// let options = LinearCrossEntropyOptions::new().with_ignore_index(-100);
/// let loss = linear_cross_entropy(hidden, embedding, targets, options);
/// assert!(loss.into_scalar::<f32>() > 0.0);
/// # }
/// # }
/// ```
pub fn linear_cross_entropy(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    targets: Tensor<1, Int>,
    options: LinearCrossEntropyOptions,
) -> Tensor<1> {
    let [rows, width] = hidden.dims();
    let is_embedding = options.layout == WeightLayout::Embedding;
    let [classes, weight_width] = match (weight.dims(), is_embedding) {
        (dims, true) => dims,
        ([width, classes], false) => [classes, width],
    };
    assert_eq!(weight_width, width, "the weight must have the width of the hidden values");
    assert_eq!(targets.dims(), [rows], "there must be one target for each row");
    if let Some(bias) = &options.bias {
        assert_eq!(bias.dims(), [classes], "the bias must have one element for each class");
    }
    assert!(classes <= CLASSES, "{classes} classes are more than {CLASSES}");
    let smoothing = options.label_smoothing;
    assert!((0.0..=1.0).contains(&smoothing), "a smoothing of {smoothing} is not in [0, 1]");

    let rule = LossRule {
        embedding: is_embedding,
        ignored: options.ignore_index.map(|target| target as f32),
        smoothing,
        mean: matches!(options.reduction, Reduction::Mean | Reduction::Auto),
        chunk: options.chunk(rows, classes),
        gradients: [false; 3],
    };
    let targets = targets.cast(FloatDType::F32);
    let inputs = LossInputs { hidden, weight, bias: options.bias, targets };
    let loss = linear_cross_entropy_tracked(&inputs, rule);
    let loss = loss.unwrap_or_else(|| composed(inputs, &rule));
    match options.reduction {
        Reduction::BatchMean => loss.div_scalar(rows.max(1) as f64),
        _ => loss,
    }
}

/// Computes the loss with Burn's operations, from all logits.
fn composed(inputs: LossInputs, rule: &LossRule) -> Tensor<1> {
    let LossInputs { hidden, weight, bias, targets } = inputs;
    let weight = if rule.embedding { weight.transpose() } else { weight };
    let mut logits = hidden.matmul(weight);
    if let Some(bias) = bias {
        logits = logits + bias.unsqueeze();
    }
    let ([rows, classes], device) = (logits.dims(), logits.device());
    let dtype = wide(logits.dtype());
    let shares = log_softmax(logits.cast(dtype), 1);
    let numbers = Tensor::<1, Int>::arange(0..classes as i64, &device).cast(FloatDType::F32);
    let is_target = numbers.unsqueeze::<2>().equal(targets.clone().reshape([rows, 1]));
    let expected = is_target.float().cast(dtype).mul_scalar(1.0 - rule.smoothing);
    let expected = expected.add_scalar(rule.smoothing / classes as f64);
    let losses = (shares * expected).sum_dim(1).squeeze_dim::<1>(1).neg();
    let counts = match rule.ignored {
        Some(ignored) => targets.not_equal_elem(ignored).float().cast(dtype),
        None => Tensor::ones([rows], (&device, dtype)),
    };
    let loss = (losses * counts.clone()).sum();
    if rule.mean { loss / counts.sum().clamp_min(1.0) } else { loss }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::{Device, Distribution};

    use super::*;

    /// Devices with kernels never reach this form.
    #[test]
    fn the_form_with_all_logits_is_the_same_function() {
        let device = Device::flex().autodiff();
        device.seed(5);
        let distribution = Distribution::Normal(0.0, 1.0);
        let hidden = Tensor::<2>::random([30, 8], distribution, &device).require_grad();
        let weight = Tensor::<2>::random([8, 40], distribution, &device).require_grad();
        let bias = Tensor::<1>::random([40], distribution, &device).require_grad();
        let targets: Vec<f32> = (0..30).map(|row| (row % 7) as f32).collect();
        let targets = Tensor::<1>::from_floats(targets.as_slice(), &device);
        for (mean, ignored) in [(true, Some(3.0)), (false, None)] {
            let rule = LossRule {
                embedding: false,
                ignored,
                smoothing: 0.2,
                mean,
                chunk: 7,
                gradients: [false; 3],
            };
            let inputs = || LossInputs {
                hidden: hidden.clone(),
                weight: weight.clone(),
                bias: Some(bias.clone()),
                targets: targets.clone(),
            };
            let chunks = linear_cross_entropy_tracked(&inputs(), rule).expect("Flex has kernels");
            let results = [chunks, composed(inputs(), &rule)].map(|loss| {
                let gradients = loss.backward();
                let mut numbers: Vec<f64> = loss.inner().into_data().iter().collect();
                for tensor in [&hidden, &weight] {
                    numbers.extend(tensor.grad(&gradients).unwrap().into_data().iter::<f64>());
                }
                numbers.extend(bias.grad(&gradients).unwrap().into_data().iter::<f64>());
                numbers
            });
            let [chunks, all] = &results;
            assert_eq!(chunks.len(), all.len());
            for (at, (a, b)) in chunks.iter().zip(all).enumerate() {
                assert!((a - b).abs() < 1e-4, "element {at}: {a} {b}");
            }
        }
    }

    #[test]
    fn chunks_are_about_equal() {
        let options = LinearCrossEntropyOptions::new();
        assert_eq!(options.chunk(1024, 50_272), 256);
        assert_eq!(options.chunk(10, 50), 10);
        assert_eq!(options.chunk(64, CLASSES), 16);
        assert_eq!(options.with_chunk_rows(7).chunk(50, 300), 7);
    }
}
