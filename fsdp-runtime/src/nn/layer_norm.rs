//! Layer normalization, with one kernel for forward and two for backward.

use burn::config::Config;
use burn::module::{Content, DisplaySettings, Initializer, Module, ModuleDisplay, Param};
use burn::tensor::{DType, Device, Tensor};

use crate::backend::ops::{NormalizationInputs, NormalizationRule, normalize_tracked};
use crate::module::{FsdpModule, Node, ParamMapper, ParamVisitor};

/// Configuration of a [`LayerNorm`] layer. Its fields and defaults are those of
/// `burn::nn::LayerNormConfig`.
#[derive(Config, Debug)]
pub struct LayerNormConfig {
    /// Size of the last dimension of inputs.
    pub d_model: usize,
    /// Number added to the variance. Default: 1e-5.
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// Whether the layer has a bias, `beta`. Default: true.
    #[config(default = true)]
    pub bias: bool,
}

impl LayerNormConfig {
    /// Initialises the layer: `gamma` with ones, `beta` with zeros.
    pub fn init(&self, device: &Device) -> LayerNorm {
        LayerNorm {
            gamma: Initializer::Ones.init([self.d_model], device),
            beta: self.bias.then(|| Initializer::Zeros.init([self.d_model], device)),
            epsilon: self.epsilon,
        }
    }
}

/// Applies layer normalization over the last dimension:
/// `(x - mean) / √(variance + epsilon) · gamma + beta`, with the mean and the biased variance of each
/// row. Source: Ba, Kiros and Hinton, [*Layer Normalization*](https://arxiv.org/abs/1607.06450), 2016.
///
/// The layer replaces `burn::nn::LayerNorm`: records, checkpoint keys (`weight` and `bias`) and results,
/// but for rounding, are the same. One kernel computes it and two its gradients, for tensors of f32, bf16
/// and f16. The kernels compute in f32. For other dtypes and devices, for inputs without elements, and if
/// input and parameters differ in dtype, the layer calls Burn's
/// [`layer_norm`](burn::tensor::module::layer_norm), whose gradient is made of about twenty operations.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct LayerNorm {
    /// Weight, `[d_model]`.
    pub gamma: Param<Tensor<1>>,
    /// Bias, `[d_model]`.
    pub beta: Option<Param<Tensor<1>>>,
    /// Number added to the variance.
    pub epsilon: f64,
}

impl LayerNorm {
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
        let (gamma, beta) = self.checked_params(&input);
        let kernel = self.kernel(&input, None, &gamma, beta.as_ref()).map(|(output, _)| output);
        kernel.unwrap_or_else(|| composed(input, gamma, beta, self.epsilon))
    }

    /// Applies the layer to the sum of `input` and `residual`, and returns the result and the sum, as
    /// [`RmsNorm::forward_residual`](super::RmsNorm::forward_residual) does.
    ///
    /// # Shapes
    ///
    /// - input, residual and both outputs: `[.., d_model]`
    ///
    /// # Panics
    ///
    /// If the last dimension of the input is not `d_model`, or if the residual has another shape.
    pub fn forward_residual<const D: usize>(
        &self,
        input: Tensor<D>,
        residual: Tensor<D>,
    ) -> (Tensor<D>, Tensor<D>) {
        let (gamma, beta) = self.checked_params(&input);
        assert_eq!(input.dims(), residual.dims(), "the residual must have the input's shape");
        let kernel = self.kernel(&input, Some(&residual), &gamma, beta.as_ref());
        if let Some((output, Some(sum))) = kernel {
            return (output, sum);
        }
        let sum = input + residual;
        (composed(sum.clone(), gamma, beta, self.epsilon), sum)
    }

    /// Returns gamma and beta. Panics if an input has rows of another length.
    fn checked_params<const D: usize>(&self, input: &Tensor<D>) -> (Tensor<1>, Option<Tensor<1>>) {
        let (gamma, beta) = (self.gamma.val(), self.beta.as_ref().map(Param::val));
        let ([d_model], last) = (gamma.dims(), input.dims()[D - 1]);
        assert_eq!(last, d_model, "the last dimension of the input must be `d_model`");
        (gamma, beta)
    }

    /// Normalizes with a kernel, if there is one for these tensors.
    fn kernel<const D: usize>(
        &self,
        input: &Tensor<D>,
        residual: Option<&Tensor<D>>,
        gamma: &Tensor<1>,
        beta: Option<&Tensor<1>>,
    ) -> Option<(Tensor<D>, Option<Tensor<D>>)> {
        let rule = NormalizationRule { centered: true, epsilon: self.epsilon as f32 };
        normalize_tracked(&NormalizationInputs { input, residual, gamma, beta }, rule)
    }
}

/// Normalises with Burn's operations, in f32 where the squares of f16 could overflow, as
/// `burn::nn::LayerNorm` does.
fn composed<const D: usize>(
    input: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    epsilon: f64,
) -> Tensor<D> {
    let layer_norm = burn::tensor::module::layer_norm::<D>;
    let dtype = input.dtype();
    if dtype != DType::F16 {
        return layer_norm(input, gamma, beta, epsilon);
    }
    let beta = beta.map(|beta| beta.cast(DType::F32));
    layer_norm(input.cast(DType::F32), gamma.cast(DType::F32), beta, epsilon).cast(dtype)
}

impl ModuleDisplay for LayerNorm {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [d_model] = self.gamma.shape().dims();
        content
            .add("d_model", &d_model)
            .add("epsilon", &self.epsilon)
            .add("bias", &self.beta.is_some())
            .optional()
    }
}

/// The layout is that of Burn's layer, so that checkpoints of one load into the other.
impl FsdpModule for LayerNorm {
    const LAYOUT: Node = <burn::nn::LayerNorm as FsdpModule>::LAYOUT;

    fn visit_params<V: ParamVisitor>(&self, visitor: &mut V) {
        if let [gamma, beta] = Self::LAYOUT.children {
            self.gamma.visit_field(gamma, visitor);
            self.beta.visit_field(beta, visitor);
        }
    }

    fn map_params<P: ParamMapper>(mut self, mapper: &mut P) -> Self {
        if let [gamma, beta] = Self::LAYOUT.children {
            self.gamma = self.gamma.map_field(gamma, mapper);
            self.beta = self.beta.map_field(beta, mapper);
        }
        self
    }
}
