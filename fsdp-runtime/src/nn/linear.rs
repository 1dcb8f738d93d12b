//! Linear layers with bias, activation and LoRA adapter in one operation.

use burn::config::Config;
use burn::module::{Content, DisplaySettings, Initializer, Module, ModuleDisplay, Param};
use burn::nn::LinearLayout;
use burn::tensor::{DType, Device, Tensor, activation};

use crate::backend::ops::{LinearParams, SharedInput, dropout_tracked, linear_tracked};
use crate::layout::TensorSplit;
use crate::module::{
    AdaptedWeight, AdapterFactors, FsdpModule, Node, ParamMapper, ParamVisitor, RunningForward,
    Sharded, SplitColumns, SplitLinear,
};

pub use fsdp_kernels::LinearActivation;

/// Configuration of a [`Linear`] layer. Its fields and defaults are those of `burn::nn::LinearConfig`.
#[derive(Config, Debug)]
pub struct LinearConfig {
    /// Size of the last dimension of inputs.
    pub d_input: usize,
    /// Size of the last dimension of outputs.
    pub d_output: usize,
    /// Whether the layer has a bias. Default: true.
    #[config(default = true)]
    pub bias: bool,
    /// Initialisation of both parameters. Default: uniform within `±1 / √d_input`, as in PyTorch.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/f64::sqrt(3.0), fan_out_only:false}")]
    pub initializer: Initializer,
    /// Layout of the weight in records. Default: `Row`, `[d_input, d_output]`.
    #[config(default = "LinearLayout::Row")]
    pub layout: LinearLayout,
}

impl LinearConfig {
    /// Initialises the layer.
    pub fn init(&self, device: &Device) -> Linear {
        let config = burn::nn::LinearConfig::new(self.d_input, self.d_output)
            .with_bias(self.bias)
            .with_initializer(self.initializer.clone())
            .with_layout(self.layout);
        config.init(device).into()
    }
}

/// Applies a linear layer, `x · weight + bias`.
///
/// The layer replaces `burn::nn::Linear`: records, checkpoint keys and initialisation are the same, and
/// results but for rounding. It differs in three ways:
///
/// - [`forward_activated`](Self::forward_activated) applies bias and activation in one pass.
/// - A LoRA adapter is not added to the weight: the layer computes `x · weight + scale · (x · a) · b`, and
///   keeps `x` and `x · a` for backward. Nothing of the weight's size is kept or computed for a frozen
///   weight. With [`LoraConfig::with_dropout`](crate::lora::LoraConfig::with_dropout) the adapter's `x` is
///   dropped in training, by a mask that is not stored. See [the page on LoRA](crate::guide::lora).
/// - In a sharded model the gradients of the parameters are computed in the dtype in which they are
///   reduced. So an f32 reduction of a bf16 model does not round them to bf16 before.
///
/// Kernels take f32, bf16 and f16 on Flex and on CubeCL devices. For other dtypes and devices, for
/// inputs without elements, and if input and parameters differ in dtype, the layer is made of Burn's
/// operations.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use fsdp_runtime::nn::{Linear, LinearActivation, LinearConfig};
///
/// # fn main() {
/// # #[cfg(feature = "flex")] {
/// let device = Device::flex();
/// let x = Tensor::<3>::ones([2, 5, 8], &device);
/// let up: Linear = LinearConfig::new(8, 32).init(&device);
/// let hidden = up.forward_activated(x.clone(), LinearActivation::Gelu);
/// assert_eq!(hidden.dims(), [2, 5, 32]);
///
/// // Query, key and value of one input.
/// let layers = [8, 4, 4].map(|outputs| LinearConfig::new(8, outputs).init(&device));
/// let [query, key, value] = Linear::forward_each(layers.each_ref(), x);
/// assert_eq!((query.dims(), key.dims(), value.dims()), ([2, 5, 8], [2, 5, 4], [2, 5, 4]));
/// # }
/// # }
/// ```
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct Linear {
    /// Weight, `[d_input, d_output]`.
    pub weight: Param<Tensor<2>>,
    /// Bias, `[d_output]`.
    pub bias: Option<Param<Tensor<1>>>,
}

impl Linear {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[.., d_input]`
    /// - output: `[.., d_output]`
    ///
    /// # Panics
    ///
    /// If the last dimension of the input is not `d_input`.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        self.forward_activated(input, LinearActivation::Identity)
    }

    /// Applies the layer, and an activation to its result. Shapes and panics are those of
    /// [`forward`](Self::forward).
    pub fn forward_activated<const D: usize>(
        &self,
        input: Tensor<D>,
        activation: LinearActivation,
    ) -> Tensor<D> {
        let params = self.params(&input.device());
        match TensorParallel::of(self) {
            Some(parallel) => parallel.apply(input, params, activation),
            None => apply(input, params, activation),
        }
    }

    /// Applies several layers to one input, such as those of query, key and value. The results are in
    /// the order of the layers. The gradient of the input is added up in one tensor. Shapes and panics
    /// are those of [`forward`](Self::forward).
    pub fn forward_each<const D: usize, const N: usize>(
        layers: [&Self; N],
        input: Tensor<D>,
    ) -> [Tensor<D>; N] {
        let device = input.device();
        let parallel = layers.map(TensorParallel::of);
        let params = layers.map(|layer| layer.params(&device));
        if parallel.iter().any(Option::is_some) {
            return Self::forward_each_part(parallel, params, input);
        }
        let Some((common, sum)) = SharedInput::new(&input) else {
            return params.map(|params| apply(input.clone(), params, Default::default()));
        };
        params.map(|params| {
            check_input(&common, &params.weight.base);
            linear_tracked(&common, &params, Default::default(), Some(&sum))
                .unwrap_or_else(|| composed(input.clone(), params, Default::default()))
        })
    }

    /// Applies layers of which some are split over tensor parallel ranks. Those that take the whole input
    /// share the sum of its gradient.
    fn forward_each_part<const D: usize, const N: usize>(
        parallel: [Option<TensorParallel<'_>>; N],
        params: [LinearParams; N],
        input: Tensor<D>,
    ) -> [Tensor<D>; N] {
        let mut shared = None;
        let mut params = params.into_iter();
        parallel.map(|parallel| {
            let params = params.next().expect("parameters of each layer");
            match parallel {
                Some(parallel) if parallel.takes_whole_inputs() => {
                    let enter = || parallel.weight.enter_split(input.clone());
                    let shared = shared.get_or_insert_with(enter);
                    parallel.apply_to_shared(shared.clone(), params, Default::default())
                }
                Some(parallel) => parallel.apply(input.clone(), params, Default::default()),
                None => apply(input.clone(), params, Default::default()),
            }
        })
    }

    /// Returns the full parameters, for an input on `device`.
    fn params(&self, device: &Device) -> LinearParams {
        let weight = AdaptedWeight::of(&self.weight, device);
        LinearParams { weight, bias: self.bias.as_ref().map(Param::val) }
    }
}

/// How a layer is split over tensor parallel ranks.
struct TensorParallel<'a> {
    weight: &'a Sharded,
    split: TensorSplit,
}

impl<'a> TensorParallel<'a> {
    /// Returns how a layer is split, if it is.
    fn of(layer: &'a Linear) -> Option<Self> {
        let (weight, split) = Sharded::split_of(&layer.weight)?;
        Some(Self { weight, split })
    }

    /// Returns whether the layer takes the whole input, and has a part of the outputs.
    fn takes_whole_inputs(&self) -> bool {
        self.split.dim == 1
    }

    /// Returns a factor that all ranks have, whose gradient is the sum of theirs.
    fn share(&self, factor: Tensor<2>) -> Tensor<2> {
        self.weight.share_with_tensor_ranks(factor)
    }

    /// Returns the parameters, of which those that are whole have gradients of all ranks.
    fn params(&self, mut params: LinearParams) -> LinearParams {
        if let Some(adapter) = &mut params.weight.adapter {
            let whole = if self.takes_whole_inputs() { &mut adapter.a } else { &mut adapter.b };
            *whole = self.share(whole.clone());
        }
        params
    }

    /// Applies a layer that has a part of the outputs, to an input that [`Sharded::enter_split`] returned.
    /// Returns the outputs of all ranks if the layer gathers them.
    fn apply_to_shared<const D: usize>(
        &self,
        input: Tensor<D>,
        params: LinearParams,
        activation: LinearActivation,
    ) -> Tensor<D> {
        let output = apply(input, self.params(params), activation);
        match self.split.gathers {
            true => self.weight.gather_outputs(output),
            false => output,
        }
    }

    /// Applies the layer, and an activation to its result. The ranks add their products if each has a part of
    /// the inputs.
    fn apply<const D: usize>(
        &self,
        input: Tensor<D>,
        params: LinearParams,
        activation: LinearActivation,
    ) -> Tensor<D> {
        if self.takes_whole_inputs() {
            return self.apply_to_shared(self.weight.enter_split(input), params, activation);
        }
        // The bias is added once, to the sum.
        let LinearParams { weight, bias } = self.params(params);
        let part = apply(input, LinearParams { weight, bias: None }, Default::default());
        let sum = self.weight.leave_split(part);
        let sum = match bias {
            Some(bias) => sum + bias.unsqueeze(),
            None => sum,
        };
        activated(sum, activation)
    }
}

/// Applies a linear layer, `activation(x · weight + bias)`, as one operation: [`Linear`] for parameters
/// that are tensors. Gradients have the dtype of the parameters.
///
/// # Shapes
///
/// - input: `[.., d_input]`
/// - weight: `[d_input, d_output]`
/// - bias: `[d_output]`
/// - output: `[.., d_output]`
///
/// # Panics
///
/// If the shapes do not fit one another.
pub fn linear<const D: usize>(
    input: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    activation: LinearActivation,
) -> Tensor<D> {
    if let Some(bias) = &bias {
        let [_, outputs] = weight.dims();
        assert_eq!(bias.dims(), [outputs], "the bias must have an element for each output");
    }
    let weight = AdaptedWeight { base: weight, adapter: None, reduce_dtype: None };
    apply(input, LinearParams { weight, bias }, activation)
}

/// Returns the bytes that a linear layer keeps for backward beside its input: the result before the
/// activation, if that is not the identity, and `[rows, adapter_rank]` elements for a LoRA adapter. An
/// `adapter_rank` of 0 stands for a layer without one. For
/// [`MemoryForecast::with_activations`](crate::memory::MemoryForecast::with_activations).
pub fn linear_bytes(
    rows: usize,
    outputs: usize,
    activation: LinearActivation,
    adapter_rank: usize,
    dtype: DType,
) -> usize {
    let columns = if activation == LinearActivation::Identity { 0 } else { outputs };
    rows * (columns + adapter_rank) * dtype.size()
}

/// Applies the layer by a kernel, or by Burn's operations where there is none.
fn apply<const D: usize>(
    input: Tensor<D>,
    params: LinearParams,
    activation: LinearActivation,
) -> Tensor<D> {
    check_input(&input, &params.weight.base);
    linear_tracked(&input, &params, activation, None)
        .unwrap_or_else(|| composed(input, params, activation))
}

fn check_input<const D: usize>(input: &Tensor<D>, weight: &Tensor<2>) {
    let ([d_input, _], last) = (weight.dims(), input.dims()[D - 1]);
    assert_eq!(last, d_input, "the last dimension of the input must be `d_input`");
}

/// Applies the layer by Burn's operations, with the adapter added to the weight, as Burn's layer does. An
/// adapter whose input is masked is added to the result.
fn composed<const D: usize>(
    input: Tensor<D>,
    params: LinearParams,
    activation: LinearActivation,
) -> Tensor<D> {
    let LinearParams { weight: AdaptedWeight { base, adapter, .. }, bias } = params;
    let linear = burn::tensor::module::linear;
    let output = match adapter {
        Some(AdapterFactors { a, b, scale, dropout: None }) => {
            let addition = a.matmul(b).mul_scalar(scale);
            let is_dense = base.dtype().is_float();
            let base = if is_dense { base.cast(addition.dtype()) } else { base };
            linear(input, base + addition, bias)
        }
        Some(AdapterFactors { a, b, scale, dropout: Some(mask) }) => {
            let is_dense = base.dtype().is_float();
            let base = if is_dense { base.cast(a.dtype()) } else { base.dequantize() };
            let dropped =
                dropout_tracked(&RunningForward::mask(&mask, &input.dims()), input.clone());
            let low = linear(dropped, a, None).mul_scalar(scale);
            linear(input, base, bias) + linear(low, b, None)
        }
        None => linear(input, base, bias),
    };
    activated(output, activation)
}

/// Applies an activation by Burn's operations, but for the exact GELU, which has a kernel.
fn activated<const D: usize>(output: Tensor<D>, activation: LinearActivation) -> Tensor<D> {
    match activation {
        LinearActivation::Identity => output,
        LinearActivation::Gelu => super::gelu(output),
        LinearActivation::GeluTanh => activation::gelu_approximate(output),
        LinearActivation::Relu => activation::relu(output),
        LinearActivation::Silu => activation::silu(output),
        other => unreachable!("no form of Burn's operations for {other:?}"),
    }
}

impl SplitLinear for Linear {}

impl SplitColumns for Linear {}

impl From<burn::nn::Linear> for Linear {
    fn from(layer: burn::nn::Linear) -> Self {
        Self { weight: layer.weight, bias: layer.bias }
    }
}

impl From<Linear> for burn::nn::Linear {
    fn from(layer: Linear) -> Self {
        Self { weight: layer.weight, bias: layer.bias }
    }
}

impl ModuleDisplay for Linear {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [d_input, d_output] = self.weight.shape().dims();
        content
            .add("d_input", &d_input)
            .add("d_output", &d_output)
            .add("bias", &self.bias.is_some())
            .optional()
    }
}

/// The layout is that of Burn's layer, so that checkpoints of one load into the other, and adapters find
/// it.
impl FsdpModule for Linear {
    const LAYOUT: Node = <burn::nn::Linear as FsdpModule>::LAYOUT;

    fn visit_params<V: ParamVisitor>(&self, visitor: &mut V) {
        visitor.applies_adapters();
        if let [weight, bias] = Self::LAYOUT.children {
            self.weight.visit_field(weight, visitor);
            self.bias.visit_field(bias, visitor);
        }
    }

    fn map_params<P: ParamMapper>(mut self, mapper: &mut P) -> Self {
        if let [weight, bias] = Self::LAYOUT.children {
            self.weight = self.weight.map_field(weight, mapper);
            self.bias = self.bias.map_field(bias, mapper);
        }
        self
    }
}
