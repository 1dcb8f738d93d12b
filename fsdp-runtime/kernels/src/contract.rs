//! The operations that each backend implements as kernels.

use std::ops::Range;

use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, Shape};

use super::attention::composed::{self, DropoutKernels};
use super::attention::{AttentionRule, AttentionTensors};
use super::batched_steps::StepBatch;
use super::cross_entropy::{self, LossResults, LossRule, LossTensors};
use super::linear::LinearActivation;
use super::mask::{MaskPart, MaskSource};
use super::normalization::{
    NormalizationGrads, NormalizationRule, NormalizationTensors, Normalized,
};
use super::random_rounding::RandomRounding;
use super::rotary::{RotaryRule, RotaryTensors};
use super::update_rules::{AdamStep, SgdStep};
use crate::StorageType;
use crate::norm::Norm;
use crate::tensor::Float;

/// Kernels of one backend, on tensors of f32, bf16 and f16.
///
/// Offsets and ranges count elements of the flattened tensor. An implementation panics if an offset
/// or a range exceeds a tensor: `fsdp-runtime` computes them, and the public functions of its module
/// `kernels` check theirs. "In place" means: in the tensor's own memory if no other tensor shares
/// that memory, else in a copy.
pub trait Kernels: Backend {
    /// Copies each tensor into `buffer` from the given offset on, rounded to the buffer's dtype.
    /// The rest of the buffer keeps its elements. In place.
    fn pack(parts: Vec<(Float<Self>, usize)>, buffer: Float<Self>) -> Float<Self>;

    /// Copies parts of `buffer`, given by offset and shape, to new tensors: divided in f32 by
    /// `divisor` if there is one, then rounded to `dtype`.
    fn unpack(
        buffer: Float<Self>,
        parts: Vec<(usize, Shape)>,
        dtype: DType,
        divisor: Option<f32>,
    ) -> Vec<Float<Self>>;

    /// Copies a tensor: divided in f32 by `divisor` if there is one, then rounded to `dtype`.
    fn cast(tensor: Float<Self>, dtype: DType, divisor: Option<f32>) -> Float<Self>;

    /// Casts tensors to `dtype`. On CubeCL devices they share kernel launches, and the results share
    /// an allocation.
    fn cast_all(tensors: Vec<Float<Self>>, dtype: DType) -> Vec<Float<Self>> {
        tensors.into_iter().map(|tensor| Self::cast(tensor, dtype, None)).collect()
    }

    /// Returns the elements of records of codes, rounded from f32 to `dtype`.
    ///
    /// `codes` are the words of the records, as f32 elements with their bits. The last record may
    /// have more elements than `shape`. Products and sums round as
    /// `codes::decode` does.
    fn decode(codes: Float<Self>, storage: StorageType, shape: Shape, dtype: DType) -> Float<Self>;

    /// Returns the records of elements `range` as [`StorageType::Int8`] has them, in blocks counted from
    /// the start of the range: the words that `codes::encode` makes, as f32 elements with their
    /// bits.
    fn encode_int8(tensor: Float<Self>, range: Range<usize>, block: usize) -> Float<Self>;

    /// Returns the means, in f32 and in the order given. Each element of a mean depends only on the
    /// parts' elements at its index.
    fn rank_means(means: Vec<RankMean<Float<Self>>>) -> Vec<Float<Self>>;

    /// Returns for each tensor the partial sums over its elements in the range.
    fn sums(parts: &[(Float<Self>, Range<usize>)], norm: Norm) -> Vec<Sums>;

    /// Multiplies the tensors by `factor` in place. Also returns the partial sums of each product.
    fn unscale(tensors: Vec<Float<Self>>, factor: f32, norm: Norm)
    -> (Vec<Float<Self>>, Vec<Sums>);

    /// Returns the tensor multiplied by a dropout mask. The mask is generated on the fly and not
    /// stored.
    fn dropout(tensor: Float<Self>, source: &MaskSource) -> Float<Self>;

    /// Returns the tensor, which has as many elements as the part, multiplied by a part of a dropout mask.
    fn dropout_part(tensor: Float<Self>, source: &MaskSource, part: &MaskPart) -> Float<Self>;

    /// Returns f32 elements rounded to bf16 at random, as
    /// the header of `random_rounding.rs` describes.
    fn round_at_random(tensor: Float<Self>, rounding: &RandomRounding) -> Float<Self>;

    /// Returns `x · Φ(x)` for each element, where Φ is the standard normal distribution, with an
    /// error below 3e-7 · max(1, |x|) before it is rounded to the tensor's dtype. Flex takes f32
    /// only.
    fn gelu(tensor: Float<Self>) -> Float<Self>;

    /// Returns the gradient of the tensor that [`gelu`](Self::gelu) was applied to, given that of
    /// the result. Both have one shape and dtype.
    fn gelu_backward(tensor: Float<Self>, grad: Float<Self>) -> Float<Self>;

    /// Returns `activation(product + bias)`, where the bias, if there is one, is added to each row. The
    /// tensors have one dtype of f32, bf16 and f16; the sum is in f32. `product` is a matrix.
    fn biased(
        product: Float<Self>,
        bias: Option<Float<Self>>,
        activation: LinearActivation,
    ) -> Float<Self>;

    /// Returns the gradient of `product`, given that of the result of [`biased`](Self::biased).
    fn biased_backward(
        product: Float<Self>,
        bias: Option<Float<Self>>,
        grad: Float<Self>,
        activation: LinearActivation,
    ) -> Float<Self>;

    /// Returns the sums of the columns of a matrix, `[columns]`, in f32.
    fn column_sums(matrix: Float<Self>) -> Float<Self> {
        let columns = matrix.shape()[1];
        let sums = Self::float_sum_dim(cast::<Self>(matrix, DType::F32), 0);
        Self::float_reshape(sums, Shape::from([columns]))
    }

    /// Returns `a · b` in `dtype`, which is that of both or f32. Tensors have as many dimensions; those but
    /// the last two are equal. The product is not rounded to a narrower dtype before.
    fn product(factors: [Float<Self>; 2], dtype: DType) -> Float<Self> {
        product::<Self>(factors, dtype)
    }

    /// Returns whether [`product`](Self::product) on the device is an implementation of this crate. Elsewhere
    /// it is Burn's, whose operations may be fused if its tensors are not lowered before.
    fn has_product(device: &Self::Device) -> bool {
        Self::by_library(device)
    }

    /// Returns whether products on the device are calls of a library of matrix products, which add a bias as
    /// they write.
    fn by_library(_device: &Self::Device) -> bool {
        false
    }

    /// Returns `activation(a · b + bias)`, for matrices of one dtype, and the sums before the activation if
    /// it is not the identity.
    fn biased_product(
        factors: [Float<Self>; 2],
        bias: Option<Float<Self>>,
        activation: LinearActivation,
    ) -> (Float<Self>, Option<Float<Self>>) {
        let dtype = factors[0].dtype();
        let sums = Self::biased(Self::product(factors, dtype), bias, LinearActivation::Identity);
        match activation {
            LinearActivation::Identity => (sums, None),
            _ => (Self::biased(sums.clone(), None, activation), Some(sums)),
        }
    }

    /// Returns `inputᵀ · grad`, and the sums of the columns of `grad`, `[columns]`, both in `dtype`: the
    /// gradients of the weight and of the bias of a linear layer.
    fn affine_gradients(input: Float<Self>, grad: Float<Self>, dtype: DType) -> [Float<Self>; 2] {
        affine_gradients::<Self>(input, grad, dtype)
    }

    /// Returns `target + a · b`, for matrices of which `a` and `b` have one dtype, and the target that one
    /// or f32. In place.
    fn add_product(target: Float<Self>, [a, b]: [Float<Self>; 2]) -> Float<Self> {
        let product = Self::product([a, b], target.dtype());
        Self::float_add(target, product)
    }

    /// Returns the gradient of a table of shape `shape`, whose rows `ids` were looked up, given the gradients of
    /// the rows. `grad` is `[ids, width]`, and `ids` are whole numbers in f32. The gradients of a row are added in
    /// order; on CubeCL devices in f32, and on Flex in the type of the gradients.
    fn table_gradient(grad: Float<Self>, ids: Float<Self>, shape: Shape) -> Float<Self>;

    /// Returns `gate · σ(gate) · up` for each element, where σ is the logistic function. Both have one shape
    /// and dtype.
    fn swiglu(gate: Float<Self>, up: Float<Self>) -> Float<Self>;

    /// Returns the gradients of `gate` and `up`, given that of the result of [`swiglu`](Self::swiglu).
    fn swiglu_backward(gate: Float<Self>, up: Float<Self>, grad: Float<Self>) -> [Float<Self>; 2];

    /// Divides each row of the last dimension by the root of its mean square, after it has subtracted the
    /// row's mean if the rule says so. Then multiplies it by `gamma` and adds `beta`. If there is a
    /// residual, it is added to the input first. Computed in f32.
    fn normalize(
        tensors: NormalizationTensors<Float<Self>>,
        rule: &NormalizationRule,
    ) -> Normalized<Float<Self>>;

    /// Returns the gradients of the input, of `gamma` and, if rows are centered, of `beta`, given those
    /// of the results of [`normalize`](Self::normalize). The gradient of a residual is that of the
    /// input. Sums are in f32.
    fn normalize_backward(
        tensors: NormalizationGrads<Float<Self>>,
        rule: &NormalizationRule,
    ) -> Vec<Float<Self>>;

    /// Rotates the pairs of elements of each row by the angles of its position: `(a, b)` becomes
    /// `(a · cos - b · sin, b · cos + a · sin)`. Computed in f32. The input need not be
    /// contiguous.
    ///
    /// Positions beyond the table panic on Flex. On CubeCL devices, whose positions the host does not
    /// read, their rows are NaN.
    fn rotate(tensors: RotaryTensors<Float<Self>>, rule: &RotaryRule) -> Float<Self>;

    /// Returns the softmax of each row of the last dimension. Its sum is in f32. A row with a NaN, and
    /// one whose largest element is infinite, is all NaN. The tensor has at least one element. Flex takes
    /// f32 only.
    fn softmax(tensor: Float<Self>) -> Float<Self>;

    /// Returns the gradient of the tensor that [`softmax`](Self::softmax) was applied to, given the
    /// result and its gradient.
    fn softmax_backward(result: Float<Self>, grad: Float<Self>) -> Float<Self>;

    /// Returns the attention `softmax(scale · query · keyᵀ + bias) · value`, and for each query the
    /// logarithm of the sum of the exponentials of its scores, `[batch, heads, queries, 1]`, in f32 or in
    /// f64. The rule and a bias of negative infinity hide keys. The output of a query whose keys are all
    /// hidden is 0.
    ///
    /// No dimension is 0. The key heads divide the heads. The tensors have one floating-point dtype. Memory
    /// beyond the results is linear in the number of queries and in that of keys, but for up to 128 MiB under
    /// dropout.
    fn tiled_attention(
        tensors: &AttentionTensors<Float<Self>>,
        rule: &AttentionRule,
    ) -> [Float<Self>; 2] {
        composed::forward::<Self>(tensors, rule, dropout_kernels())
    }

    /// Returns the gradients of query, key and value, given the results of
    /// [`tiled_attention`](Self::tiled_attention) and the gradient of the first.
    ///
    /// The results may be those of more keys, of which these are a part. The gradients are then the part's
    /// contributions.
    fn tiled_attention_backward(
        tensors: &AttentionTensors<Float<Self>>,
        results: &[Float<Self>; 2],
        grad: &Float<Self>,
        rule: &AttentionRule,
    ) -> [Float<Self>; 3] {
        composed::backward::<Self>(tensors, results, grad, rule, dropout_kernels())
    }

    /// Returns the cross-entropy of `hidden · weight + bias` over all rows, and its gradients. The logits
    /// exist only for as many rows as the rule says.
    ///
    /// No dimension is 0. The tensors have one floating-point dtype. Results are in f32, or in f64 for
    /// tensors of f64.
    fn linear_cross_entropy(
        tensors: &LossTensors<Float<Self>>,
        rule: &LossRule,
    ) -> LossResults<Float<Self>> {
        cross_entropy::forward::<Self>(tensors, rule)
    }

    /// Returns a tensor times a factor of shape `[1]` and of the tensor's dtype, rounded to `dtype`.
    fn scale(tensor: Float<Self>, factor: Float<Self>, dtype: DType) -> Float<Self> {
        let ones = Shape::from(vec![1; tensor.shape().num_dims()]);
        let product = Self::float_mul(tensor, Self::float_reshape(factor, ones));
        Self::float_cast(product, dtype.into())
    }

    /// Returns a new f32 tensor of zeros.
    fn zeros(device: &Self::Device, shape: Shape) -> Float<Self> {
        Self::float_zeros(shape, device, DType::F32.into())
    }

    /// Runs one step of Adam or AdamW on f32 tensors of equal length, each updated in place.
    ///
    /// If there is a batch, the step may run as late as the end of the batch's
    /// [`scope`](super::batched_steps::scope): until then the caller must not read the tensors.
    fn adam(
        step: &AdamStep,
        grad: Float<Self>,
        tensors: AdamTensors<Float<Self>>,
        batch: Option<&StepBatch>,
    ) -> AdamTensors<Float<Self>>;

    /// Runs one step of SGD on f32 tensors of equal length, each updated in place; with momentum if
    /// there is a velocity. `batch` has the meaning that it has for [`adam`](Self::adam).
    fn sgd(
        step: &SgdStep,
        grad: Float<Self>,
        param: Float<Self>,
        velocity: Option<Float<Self>>,
        batch: Option<&StepBatch>,
    ) -> (Float<Self>, Option<Float<Self>>);
}

/// Returns whether kernels support tensors of this dtype: f32, bf16 and f16.
pub fn takes(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}

/// Returns the tensor cast to `dtype`, or itself if it has that dtype.
pub fn cast<B: Kernels>(tensor: Float<B>, dtype: DType) -> Float<B> {
    match tensor.dtype() {
        found if found == dtype => tensor,
        found if takes(found) && takes(dtype) => B::cast(tensor, dtype, None),
        _ => B::float_cast(tensor, dtype.into()),
    }
}

/// Computes [`Kernels::product`] with Burn's product.
pub(crate) fn product<B: Kernels>(factors: [Float<B>; 2], dtype: DType) -> Float<B> {
    let [a, b] = factors.map(|tensor| cast::<B>(tensor, dtype));
    B::float_matmul(a, b)
}

/// Computes [`Kernels::affine_gradients`] with a product and a sum of columns.
pub(crate) fn affine_gradients<B: Kernels>(
    input: Float<B>,
    grad: Float<B>,
    dtype: DType,
) -> [Float<B>; 2] {
    let sums = cast::<B>(B::column_sums(grad.clone()), dtype);
    [B::product([B::float_transpose(input), grad], dtype), sums]
}

/// Mean over tensors of several ranks: consecutive elements of each, added in f32 in the order of
/// `parts` and then divided.
pub struct RankMean<T> {
    /// At least one tensor, each with the index of its first element that is added. All have one
    /// dtype.
    pub parts: Vec<(T, usize)>,
    /// Number by which the sum is divided.
    pub divisor: usize,
    /// Shape of the mean, which gives the number of elements.
    pub shape: Shape,
}

/// Tensors that a step of Adam updates.
pub struct AdamTensors<T> {
    /// Parameter, or this rank's shard of it.
    pub param: T,
    /// First moment: running mean of the gradient.
    pub moment_1: T,
    /// Second moment: running mean of the squared gradient.
    pub moment_2: T,
    /// Elementwise maximum of all second moments so far, under AMSGrad.
    pub max: Option<T>,
}

impl<T> AdamTensors<T> {
    /// Returns the parameter, both moments, and the maximum if there is one.
    pub fn into_vec(self) -> Vec<T> {
        [self.param, self.moment_1, self.moment_2].into_iter().chain(self.max).collect()
    }

    /// Applies `f` to each tensor.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> AdamTensors<U> {
        AdamTensors {
            param: f(self.param),
            moment_1: f(self.moment_1),
            moment_2: f(self.moment_2),
            max: self.max.map(f),
        }
    }
}

/// Partial sums of one tensor's elements, from which a norm over several tensors is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sums {
    /// Sum of the norm's terms: of `|x|` for norm 1, `x²` for norm 2 and `|x|ᵖ` for norm p; 0 for
    /// the infinity norm.
    pub sum: f64,
    /// Largest magnitude; NaN if an element is NaN, 0 if there are no elements.
    pub largest: f32,
}

impl Sums {
    /// Returns the tensor's contribution to `norm`: [`largest`](Self::largest) for the infinity
    /// norm, else [`sum`](Self::sum). Contributions of several tensors are added, or for the
    /// infinity norm their maximum is taken.
    pub fn term(&self, norm: Norm) -> f64 {
        match norm {
            Norm::Inf => f64::from(self.largest),
            _ => self.sum,
        }
    }

    /// Returns whether no element is infinite or NaN. The sum may overflow all the same.
    pub fn is_finite(&self) -> bool {
        self.largest.is_finite()
    }
}

/// Returns the kernels of dropout, for attention made of Burn's operations.
pub(crate) fn dropout_kernels<B: Kernels>() -> DropoutKernels<B> {
    DropoutKernels { whole: B::dropout, part: B::dropout_part }
}
