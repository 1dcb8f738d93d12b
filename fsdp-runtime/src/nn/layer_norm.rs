//! Layer normalization, with one kernel for forward and two for backward.

use burn::config::Config;
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Tensor};

use crate::backend::ops::layer_norm_tracked;
use crate::module::{Child, FsdpModule, Kind, Node, ParamMapper, ParamVisitor};

/// Configuration of a [`LayerNorm`] layer.
#[derive(Config, Debug)]
pub struct LayerNormConfig {
    /// Number of features: the size of the last dimension of the input.
    pub d_model: usize,
    /// Number that is added to the variance. Default: 1e-5
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// Whether the layer has a bias. Default: true
    #[config(default = true)]
    pub bias: bool,
}

impl LayerNormConfig {
    /// Initialises the layer: the weight with ones, the bias with zeros.
    pub fn init(&self, device: &Device) -> LayerNorm {
        let constant = |initializer: Initializer| initializer.init([self.d_model], device);
        LayerNorm {
            gamma: constant(Initializer::Ones),
            beta: self.bias.then(|| constant(Initializer::Zeros)),
            epsilon: self.epsilon,
        }
    }
}

/// Normalizes the last dimension of a tensor: `γ · (x − mean) / √(variance + ε) + β`.
///
/// The layer has the fields, the checkpoint keys and the values of `burn::nn::LayerNorm`, and takes
/// its place. One kernel computes the output, and two compute the gradients. In a training step on
/// CubeCL devices with fusion on, Burn's layer takes at least 20 launches more. Sums are in f32.
///
/// The kernels serve f32 tensors on Flex, and f32, bf16 and f16 tensors on CubeCL devices. On other
/// devices and for other dtypes the layer calls Burn's.
///
/// Source: Ba, Kiros and Hinton, [Layer Normalization](https://arxiv.org/abs/1607.06450).
#[derive(Module, Debug)]
pub struct LayerNorm {
    /// Weight γ, of shape `[d_model]`.
    pub gamma: Param<Tensor<1>>,
    /// Bias β, of shape `[d_model]`.
    pub beta: Option<Param<Tensor<1>>>,
    /// Number that is added to the variance.
    pub epsilon: f64,
}

impl LayerNorm {
    /// Normalizes the last dimension of a tensor.
    ///
    /// # Shapes
    ///
    /// - input and output: `[.., d_model]`
    ///
    /// # Panics
    ///
    /// If the last dimension of the input is not `d_model`.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let (gamma, beta) = (self.gamma.val(), self.beta.as_ref().map(Param::val));
        let [features] = gamma.dims();
        let last = input.dims()[D - 1];
        assert_eq!(last, features, "the last dimension has {last} elements, not {features}");
        layer_norm_tracked(&input, &gamma, beta.as_ref(), self.epsilon)
            .unwrap_or_else(|| burn::tensor::module::layer_norm(input, gamma, beta, self.epsilon))
    }
}

impl FsdpModule for LayerNorm {
    const LAYOUT: Node = Node {
        ty: "LayerNorm",
        kind: Kind::Module,
        children: &[
            Child {
                name: "gamma",
                key: Some("weight"),
                transposed: false,
                unit: false,
                node: &<Param<Tensor<1>> as FsdpModule>::LAYOUT,
            },
            Child {
                name: "beta",
                key: Some("bias"),
                transposed: false,
                unit: false,
                node: &<Option<Param<Tensor<1>>> as FsdpModule>::LAYOUT,
            },
        ],
        ties: &[],
    };

    fn visit_params<V: ParamVisitor>(&self, visitor: &mut V) {
        self.gamma.visit_field(&Self::LAYOUT.children[0], visitor);
        self.beta.visit_field(&Self::LAYOUT.children[1], visitor);
    }

    fn map_params<P: ParamMapper>(mut self, mapper: &mut P) -> Self {
        self.gamma = self.gamma.map_field(&Self::LAYOUT.children[0], mapper);
        self.beta = self.beta.map_field(&Self::LAYOUT.children[1], mapper);
        self
    }
}
