//! RMS normalization, with one kernel for forward and two for backward.

use burn::config::Config;
use burn::module::{Content, DisplaySettings, Initializer, Module, ModuleDisplay, Param};
use burn::tensor::{Device, Tensor};

use crate::backend::ops::{NormalizationInputs, NormalizationRule, normalize_tracked, wide};
use crate::module::{FsdpModule, Node, ParamMapper, ParamVisitor};

/// Configuration of an [`RmsNorm`] layer. Its fields and defaults are those of
/// `burn::nn::RmsNormConfig`.
#[derive(Config, Debug)]
pub struct RmsNormConfig {
    /// Size of the last dimension of inputs.
    pub d_model: usize,
    /// Number added to the mean of the squares. Default: 1e-5.
    #[config(default = 1e-5)]
    pub epsilon: f64,
}

impl RmsNormConfig {
    /// Initialises the layer: `gamma` with ones.
    ///
    /// # Panics
    ///
    /// If `epsilon` is not positive.
    pub fn init(&self, device: &Device) -> RmsNorm {
        assert!(self.epsilon > 0.0, "epsilon must be positive, and {} is not", self.epsilon);
        RmsNorm { gamma: Initializer::Ones.init([self.d_model], device), epsilon: self.epsilon }
    }
}

/// Applies RMS normalization over the last dimension: `x / √(mean(x²) + epsilon) · gamma`. Source: Zhang and
/// Sennrich, [*Root Mean Square Layer Normalization*](https://arxiv.org/abs/1910.07467), 2019.
///
/// The layer replaces `burn::nn::RmsNorm`: records, the checkpoint key `weight` and results, but for
/// rounding, are the same, and `From` converts both ways. One kernel computes it and two its gradients, for
/// tensors of f32, bf16 and f16. They compute in f32 and round the result to the input's dtype once, where
/// Burn's layer also rounds the root and the quotient.
///
/// For other dtypes and devices, for inputs without elements, and if input and `gamma` differ in dtype, the
/// layer is made of Burn's operations, in f32 or, for inputs of f64, in f64. The result has the input's dtype.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct RmsNorm {
    /// Weight, `[d_model]`.
    pub gamma: Param<Tensor<1>>,
    /// Number added to the mean of the squares.
    pub epsilon: f64,
}

impl RmsNorm {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input and output: `[.., d_model]`
    ///
    /// # Panics
    ///
    /// If the last dimension of the input is not `d_model`.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let gamma = self.checked_gamma(&input);
        let kernel = self.kernel(&input, None, &gamma).map(|(output, _)| output);
        kernel.unwrap_or_else(|| self.composed(input, gamma))
    }

    /// Applies the layer to the sum of `input` and `residual`, and returns the result and the sum.
    ///
    /// In a transformer the sum is the residual of the next block. One kernel computes both results, and
    /// backward adds the gradient of the sum in the pass in which it computes that of the norm. On Flex the
    /// bits of f32 results and gradients are those of the addition followed by [`forward`](Self::forward).
    ///
    /// # Shapes
    ///
    /// - input, residual and both outputs: `[.., d_model]`
    ///
    /// # Panics
    ///
    /// If the last dimension of the input is not `d_model`, or if the residual has another shape.
    ///
    /// # Example
    ///
    /// ```
    /// use burn::tensor::Tensor;
    /// use fsdp_runtime::nn::RmsNorm;
    ///
    /// /// Attention and feed-forward of a Llama's layer: each reads the normalized sum so far.
    /// fn layer(
    ///     norms: &[RmsNorm; 2],
    ///     blocks: [fn(Tensor<3>) -> Tensor<3>; 2],
    ///     (update, sum): (Tensor<3>, Tensor<3>),
    /// ) -> (Tensor<3>, Tensor<3>) {
    ///     let (normed, sum) = norms[0].forward_residual(update, sum);
    ///     let (normed, sum) = norms[1].forward_residual(blocks[0](normed), sum);
    ///     (blocks[1](normed), sum)
    /// }
    /// # let device = burn::tensor::Device::flex();
    /// # let norm = || fsdp_runtime::nn::RmsNormConfig::new(4).init(&device);
    /// # let x = Tensor::ones([1, 2, 4], &device);
    /// # let (update, sum) = layer(&[norm(), norm()], [|x| x, |x| x], (x.clone(), x));
    /// # assert_eq!((update.dims(), sum.dims()), ([1, 2, 4], [1, 2, 4]));
    /// ```
    pub fn forward_residual<const D: usize>(
        &self,
        input: Tensor<D>,
        residual: Tensor<D>,
    ) -> (Tensor<D>, Tensor<D>) {
        let gamma = self.checked_gamma(&input);
        assert_eq!(input.dims(), residual.dims(), "the residual must have the input's shape");
        if let Some((output, Some(sum))) = self.kernel(&input, Some(&residual), &gamma) {
            return (output, sum);
        }
        let sum = input + residual;
        (self.composed(sum.clone(), gamma), sum)
    }

    /// Returns gamma. Panics if an input has rows of another length.
    fn checked_gamma<const D: usize>(&self, input: &Tensor<D>) -> Tensor<1> {
        let gamma = self.gamma.val();
        let ([d_model], last) = (gamma.dims(), input.dims()[D - 1]);
        assert_eq!(last, d_model, "the last dimension of the input must be `d_model`");
        gamma
    }

    /// Normalizes with a kernel, if there is one for these tensors.
    fn kernel<const D: usize>(
        &self,
        input: &Tensor<D>,
        residual: Option<&Tensor<D>>,
        gamma: &Tensor<1>,
    ) -> Option<(Tensor<D>, Option<Tensor<D>>)> {
        let rule = NormalizationRule { centered: false, epsilon: self.epsilon as f32 };
        normalize_tracked(&NormalizationInputs { input, residual, gamma, beta: None }, rule)
    }

    /// Normalizes with Burn's operations.
    fn composed<const D: usize>(&self, input: Tensor<D>, gamma: Tensor<1>) -> Tensor<D> {
        let dtype = input.dtype();
        let wide = wide(dtype);
        let (x, gamma) = (input.cast(wide), gamma.cast(wide));
        let root = (x.clone().square().mean_dim(D - 1) + self.epsilon).sqrt();
        ((x / root) * gamma.unsqueeze()).cast(dtype)
    }
}

impl From<burn::nn::RmsNorm> for RmsNorm {
    fn from(layer: burn::nn::RmsNorm) -> Self {
        Self { gamma: layer.gamma, epsilon: layer.epsilon }
    }
}

impl From<RmsNorm> for burn::nn::RmsNorm {
    fn from(layer: RmsNorm) -> Self {
        Self { gamma: layer.gamma, epsilon: layer.epsilon }
    }
}

impl ModuleDisplay for RmsNorm {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [d_model] = self.gamma.shape().dims();
        content.add("d_model", &d_model).add("epsilon", &self.epsilon).optional()
    }
}

/// The layout is that of Burn's layer, so that checkpoints of one load into the other.
impl FsdpModule for RmsNorm {
    const LAYOUT: Node = <burn::nn::RmsNorm as FsdpModule>::LAYOUT;

    fn visit_params<V: ParamVisitor>(&self, visitor: &mut V) {
        if let [gamma] = Self::LAYOUT.children {
            self.gamma.visit_field(gamma, visitor);
        }
    }

    fn map_params<P: ParamMapper>(mut self, mapper: &mut P) -> Self {
        if let [gamma] = Self::LAYOUT.children {
            self.gamma = self.gamma.map_field(gamma, mapper);
        }
        self
    }
}
