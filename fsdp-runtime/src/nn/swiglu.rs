//! SwiGLU, whose activation is one kernel for forward and one for backward.

use burn::config::Config;
use burn::module::{Content, DisplaySettings, Initializer, Module, ModuleDisplay};
use burn::nn::LinearLayout;
use burn::tensor::activation::silu;
use burn::tensor::{Device, Tensor};

use super::linear::{Linear, LinearConfig};
use crate::backend::ops::swiglu_tracked;
use crate::module::{FsdpModule, Node, ParamMapper, ParamVisitor};

/// Returns `silu(gate) · up`, where `silu(x) = x / (1 + e⁻ˣ)`: the activation of SwiGLU. Source: Shazeer,
/// [*GLU Variants Improve Transformer*](https://arxiv.org/abs/2002.05202), 2020.
///
/// One kernel computes it and one both gradients, for tensors of f32, bf16 and f16. They compute in f32 and
/// keep only `gate` and `up` for backward, where Burn's operations also keep the value of `silu`. For other
/// dtypes and devices this function calls them.
///
/// # Shapes
///
/// - gate, up and output: any shape, the same for all
///
/// # Panics
///
/// If `gate` and `up` differ in shape.
///
/// # Example
///
/// The feed-forward block of a Llama:
///
/// ```
/// use burn::tensor::Tensor;
/// use fsdp_runtime::nn::{Linear, swiglu};
///
/// fn feed_forward([gate, up, down]: &[Linear; 3], x: Tensor<3>) -> Tensor<3> {
///     let [gate, up] = Linear::forward_each([gate, up], x);
///     down.forward(swiglu(gate, up))
/// }
/// ```
pub fn swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    assert_eq!(gate.dims(), up.dims(), "`gate` and `up` must have one shape");
    swiglu_tracked(&gate, &up).unwrap_or_else(|| silu(gate) * up)
}

/// Configuration of a [`SwiGlu`] layer. Its fields and defaults are those of `burn::nn::SwiGluConfig`.
#[derive(Config, Debug)]
pub struct SwiGluConfig {
    /// Size of the last dimension of inputs.
    pub d_input: usize,
    /// Size of the last dimension of outputs.
    pub d_output: usize,
    /// Whether both linear layers have a bias. Default: false.
    #[config(default = false)]
    pub bias: bool,
    /// Initializer of both linear layers. Default: that of `burn::nn::LinearConfig`.
    #[config(
        default = "Initializer::KaimingUniform { gain: 1.0 / 3f64.sqrt(), fan_out_only: false }"
    )]
    pub initializer: Initializer,
    /// Order of the dimensions of both weights. Default: `Row`.
    #[config(default = "LinearLayout::Row")]
    pub layout: LinearLayout,
}

impl SwiGluConfig {
    /// Initialises both linear layers.
    pub fn init(&self, device: &Device) -> SwiGlu {
        let linear = || {
            LinearConfig::new(self.d_input, self.d_output)
                .with_bias(self.bias)
                .with_initializer(self.initializer.clone())
                .with_layout(self.layout)
                .init(device)
        };
        SwiGlu { linear_inner: linear(), linear_outer: linear() }
    }
}

/// Applies two linear layers to an input, and [`swiglu`] to their results: `silu(inner(x)) · outer(x)`.
///
/// The layer replaces `burn::nn::SwiGlu`: records, checkpoint keys and results, but for rounding, are the
/// same, and `From` converts both ways.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct SwiGlu {
    /// Linear layer of the gate.
    pub linear_inner: Linear,
    /// Linear layer that the gate is multiplied with.
    pub linear_outer: Linear,
}

impl SwiGlu {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[.., d_input]`
    /// - output: `[.., d_output]`
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let [gate, up] = Linear::forward_each([&self.linear_inner, &self.linear_outer], input);
        swiglu(gate, up)
    }
}

impl From<burn::nn::SwiGlu> for SwiGlu {
    fn from(layer: burn::nn::SwiGlu) -> Self {
        Self { linear_inner: layer.linear_inner.into(), linear_outer: layer.linear_outer.into() }
    }
}

impl From<SwiGlu> for burn::nn::SwiGlu {
    fn from(layer: SwiGlu) -> Self {
        Self { linear_inner: layer.linear_inner.into(), linear_outer: layer.linear_outer.into() }
    }
}

impl ModuleDisplay for SwiGlu {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [d_input, d_output] = self.linear_inner.weight.shape().dims();
        content
            .add("d_input", &d_input)
            .add("d_output", &d_output)
            .add("bias", &self.linear_inner.bias.is_some())
            .optional()
    }
}

/// The layout is that of Burn's layer, so that checkpoints of one load into the other.
impl FsdpModule for SwiGlu {
    const LAYOUT: Node = <burn::nn::SwiGlu as FsdpModule>::LAYOUT;

    fn visit_params<V: ParamVisitor>(&self, visitor: &mut V) {
        if let [inner, outer] = Self::LAYOUT.children {
            self.linear_inner.visit_field(inner, visitor);
            self.linear_outer.visit_field(outer, visitor);
        }
    }

    fn map_params<P: ParamMapper>(mut self, mapper: &mut P) -> Self {
        if let [inner, outer] = Self::LAYOUT.children {
            self.linear_inner = self.linear_inner.map_field(inner, mapper);
            self.linear_outer = self.linear_outer.map_field(outer, mapper);
        }
        self
    }
}
