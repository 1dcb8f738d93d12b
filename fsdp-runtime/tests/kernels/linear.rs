//! Linear layers and their gradients against the definition, by Burn's operations on Flex in f64.

use burn::module::{Lora, Module, ModuleMapper, Param};
use burn::tensor::activation::{gelu, gelu_approximate, relu, silu};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use fsdp_runtime::FsdpModule;
use fsdp_runtime::lora::LoraConfig;
use fsdp_runtime::nn::{Linear, LinearActivation, LinearConfig, linear};

use super::rows::{assert_rounded_by, matrix, share};
use super::support::{devices, dtypes, elements_of, exact, product_dtype};

const ACTIVATIONS: [LinearActivation; 5] = [
    LinearActivation::Identity,
    LinearActivation::Gelu,
    LinearActivation::GeluTanh,
    LinearActivation::Relu,
    LinearActivation::Silu,
];
/// Rows, inputs and outputs: single ones, no multiple of a vector's length, several tasks of Flex.
const SHAPES: [[usize; 3]; 4] = [[1, 1, 1], [3, 7, 5], [66, 64, 96], [70, 33, 1000]];
/// Rank and scale of adapters.
const ADAPTER: (usize, f64) = (2, 0.5);

/// Input, weight, factors of the adapter, bias, and the weights of the output in the loss.
#[derive(Clone)]
struct Tensors {
    input: Tensor<2>,
    weight: Tensor<2>,
    factors: Option<[Tensor<2>; 2]>,
    bias: Option<Tensor<1>>,
    of_output: Tensor<2>,
}

impl Tensors {
    /// Returns tensors of numbers that keep sums of products small.
    fn new(
        [rows, inputs, outputs]: [usize; 3],
        (adapter, bias): (bool, bool),
        device: &Device,
        dtype: FloatDType,
    ) -> Self {
        let of = |shape: [usize; 2], scale, seed| matrix(shape, scale, seed, device, dtype);
        let (rank, _) = ADAPTER;
        Self {
            input: of([rows, inputs], 1.0, 1),
            weight: of([inputs, outputs], 0.25, 2),
            factors: adapter.then(|| [of([inputs, rank], 0.25, 3), of([rank, outputs], 0.25, 4)]),
            bias: bias.then(|| of([1, outputs], 1.0, 5).reshape([outputs])),
            of_output: of([rows, outputs], 1.0, 6),
        }
    }

    /// Returns the same numbers in f64, on Flex.
    fn exact(&self) -> Self {
        Self {
            input: exact(&self.input),
            weight: exact(&self.weight),
            factors: self.factors.as_ref().map(|factors| factors.each_ref().map(exact)),
            bias: self.bias.as_ref().map(exact),
            of_output: exact(&self.of_output),
        }
    }

    /// Returns the tensors on an autodiff device, tracked but for the last.
    fn tracked(self) -> Self {
        let tracked = |tensor: Tensor<2>| Tensor::<2>::from_inner(tensor).require_grad();
        Self {
            input: tracked(self.input),
            weight: tracked(self.weight),
            factors: self.factors.map(|factors| factors.map(tracked)),
            bias: self.bias.map(|bias| Tensor::<1>::from_inner(bias).require_grad()),
            of_output: Tensor::from_inner(self.of_output),
        }
    }

    /// Returns the output of `function`, and the gradients of input, weight, factors and bias.
    fn with_gradients(self, function: impl Fn(&Self) -> Tensor<2>) -> Vec<Vec<f64>> {
        let tensors = self.tracked();
        let output = function(&tensors);
        assert_eq!(output.dtype(), tensors.input.dtype());
        let mut gradients = (output.clone() * tensors.of_output.clone()).sum().backward();
        let mut results = vec![elements_of(&output.inner())];
        let matrices = [&tensors.input, &tensors.weight].into_iter();
        for matrix in matrices.chain(tensors.factors.iter().flatten()) {
            let gradient = matrix.grad_remove(&mut gradients).expect("a gradient of each matrix");
            assert_eq!((gradient.dims(), gradient.dtype()), (matrix.dims(), matrix.dtype()));
            results.push(elements_of(&gradient));
        }
        if let Some(bias) = &tensors.bias {
            let gradient = bias.grad_remove(&mut gradients).expect("a gradient of the bias");
            assert_eq!((gradient.dims(), gradient.dtype()), (bias.dims(), bias.dtype()));
            results.push(elements_of(&gradient));
        }
        results
    }
}

/// The definition.
fn defined(tensors: &Tensors, activation: LinearActivation) -> Tensor<2> {
    let Tensors { input, weight, factors, bias, .. } = tensors.clone();
    let mut output = input.clone().matmul(weight);
    if let Some([a, b]) = factors {
        output = output + input.matmul(a).matmul(b) * ADAPTER.1;
    }
    if let Some(bias) = bias {
        output = output + bias.unsqueeze();
    }
    match activation {
        LinearActivation::Gelu => gelu(output),
        LinearActivation::GeluTanh => gelu_approximate(output),
        LinearActivation::Relu => relu(output),
        LinearActivation::Silu => silu(output),
        _ => output,
    }
}

/// Gives parameters the tensors of a list, in the order in which Burn visits them.
struct Fill(Vec<Tensor<2>>);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let tensor = self.0.remove(0);
        param.map(|param| tensor.reshape(param.dims()))
    }
}

/// Gives matrices the tensors of a list, which stay leaves of the graph, in the order in which Burn visits
/// them.
struct FillLeaves(Vec<Tensor<2>>);

impl ModuleMapper for FillLeaves {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let tensor = self.0.remove(0);
        assert_eq!(D, 2, "a matrix");
        param.map(|_| Tensor::from_dispatch(tensor.into_dispatch()))
    }
}

/// Returns this crate's layer with the parameters of `tensors`.
fn layer(tensors: &Tensors) -> Linear {
    let [inputs, outputs] = tensors.weight.dims();
    let config = LinearConfig::new(inputs, outputs).with_bias(tensors.bias.is_some());
    let mut layer = config.init(&tensors.weight.device());
    let mut filled = vec![tensors.weight.clone()];
    if let Some(factors) = &tensors.factors {
        let (rank, scale) = ADAPTER;
        layer = layer.apply_lora(Lora::new(rank, scale * rank as f64));
        filled.extend(factors.clone());
    }
    filled.extend(tensors.bias.iter().map(|bias| bias.clone().unsqueeze()));
    let mut fill = Fill(filled);
    let layer = layer.map(&mut fill);
    assert!(fill.0.is_empty(), "every tensor is a parameter");
    layer
}

/// Whether a layer has an adapter and a bias.
const FORMS: [(bool, bool); 4] = [(false, false), (false, true), (true, false), (true, true)];

/// Returns whether tuning a product takes many seconds, longer for sums of more terms: on CubeCL's CPU device, whose
/// threads wait for each other in a loop.
fn tunes_slowly(device: &Device) -> bool {
    #[cfg(feature = "cpu")]
    let slow = [Device::cpu()];
    #[cfg(not(feature = "cpu"))]
    let slow = [];
    slow.contains(device)
}

/// Returns the layers to compare. Where products tune slowly, every activation meets every form in one shape, every
/// shape has all activations and all forms, and outputs have at most 160 columns.
fn cases(device: &Device) -> Vec<([usize; 3], LinearActivation, (bool, bool))> {
    let is_short = tunes_slowly(device);
    let mut cases = Vec::new();
    for (of_activation, activation) in ACTIVATIONS.into_iter().enumerate() {
        for (of_shape, [rows, inputs, outputs]) in SHAPES.into_iter().enumerate() {
            let outputs = if is_short { outputs.min(160) } else { outputs };
            for (of_form, form) in FORMS.into_iter().enumerate() {
                if !is_short || (of_activation + of_shape + of_form) % 4 == 0 {
                    cases.push(([rows, inputs, outputs], activation, form));
                }
            }
        }
    }
    cases
}

#[test]
fn values_and_gradients_are_exact() {
    for device in devices() {
        for dtype in dtypes(&device) {
            // The slope of the rectified linear unit jumps where a product may be rounded across 0.
            let has_slope =
                |of: &LinearActivation| *of != LinearActivation::Relu || dtype == FloatDType::F32;
            for (shape, activation, form) in cases(&device) {
                if !has_slope(&activation) {
                    continue;
                }
                let tensors = Tensors::new(shape, form, &device, dtype);
                let expected =
                    tensors.exact().with_gradients(|tensors| defined(tensors, activation));
                let found = tensors.with_gradients(|tensors| {
                    layer(tensors).forward_activated(tensors.input.clone(), activation)
                });
                assert_eq!(found.len(), expected.len());
                let rounding = product_dtype(&device, dtype);
                for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let what = format!(
                        "result {number} of {shape:?}, {activation:?}, adapter and bias {form:?}, in {dtype:?} on \
                         {device:?}"
                    );
                    // The product is rounded before the activation as well as after it.
                    assert_rounded_by(2.0 * share(rounding), found, expected, &what);
                }
            }
        }
    }
}

/// Few rows of 1,000 outputs. The input has no gradient, whose sums of 1,000 terms some devices tune slowly.
#[test]
fn wide_outputs_and_their_gradients_are_exact() {
    for device in devices() {
        for dtype in dtypes(&device) {
            let tensors = Tensors::new([3, 2, 1000], (false, true), &device, dtype);
            let results = |tensors: &Tensors, function: &dyn Fn(&Tensors) -> Tensor<2>| {
                let mut tracked = tensors.clone().tracked();
                tracked.input = Tensor::from_inner(tensors.input.clone());
                let output = function(&tracked);
                let gradients = (output.clone() * tracked.of_output.clone()).sum().backward();
                let of_weight = tracked.weight.grad(&gradients).expect("a gradient of the weight");
                let bias = tracked.bias.as_ref().expect("a bias");
                let of_bias = bias.grad(&gradients).expect("a gradient of the bias");
                [elements_of(&output.inner()), elements_of(&of_weight), elements_of(&of_bias)]
            };
            let activation = LinearActivation::Gelu;
            let expected = results(&tensors.exact(), &|tensors| defined(tensors, activation));
            let found = results(&tensors, &|tensors| {
                layer(tensors).forward_activated(tensors.input.clone(), activation)
            });
            let rounding = product_dtype(&device, dtype);
            for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let what = format!("result {number} in {dtype:?} on {device:?}");
                assert_rounded_by(2.0 * share(rounding), found, expected, &what);
            }
        }
    }
}

/// The gradients of a layer with inputs and gradients of 1 are the number of rows. A kernel that divides the rows among
/// cubes must leave none out.
#[test]
fn gradients_are_sums_over_all_rows() {
    for device in devices() {
        for dtype in dtypes(&device) {
            let autodiff = device.clone().autodiff();
            let ones =
                |shape: [usize; 2]| Tensor::<2>::ones(shape, (&autodiff, DType::from(dtype)));
            let most = if tunes_slowly(&device) { 1 } else { 3 };
            for rows in [1000, 2_047, 8_195].into_iter().take(most) {
                let weight = ones([64, 96]).require_grad();
                let bias = Tensor::<1>::ones([96], (&autodiff, DType::from(dtype))).require_grad();
                let identity = LinearActivation::Identity;
                let output = linear(ones([rows, 64]), weight.clone(), Some(bias.clone()), identity);
                let gradients = output.sum().backward();
                let of_weight = weight.grad(&gradients).expect("a gradient of the weight");
                let of_bias = bias.grad(&gradients).expect("a gradient of the bias");
                let found = [elements_of(&of_weight), elements_of(&of_bias)].concat();
                let expected = vec![rows as f64; found.len()];
                let what = format!("{rows} rows in {dtype:?} on {device:?}");
                assert_rounded_by(share(dtype), &found, &expected, &what);
            }
        }
    }
}

#[test]
fn the_rectified_linear_unit_is_exact_in_every_dtype() {
    for device in devices() {
        for dtype in dtypes(&device) {
            let x = matrix([9, 70], 2.0, 1, &device, dtype);
            let numbers = elements_of(&x);
            let eye = Tensor::<2>::eye(70, &device).cast(dtype);
            let x = Tensor::<2>::from_inner(x).require_grad();
            let y = linear(x.clone(), Tensor::from_inner(eye), None, LinearActivation::Relu);
            let gradients = y.clone().sum().backward();
            let expected: Vec<f64> = numbers.iter().map(|x| x.max(0.0)).collect();
            assert_eq!(elements_of(&y.inner()), expected, "{dtype:?} on {device:?}");
            let expected: Vec<f64> = numbers.iter().map(|x| f64::from(*x > 0.0)).collect();
            let found = elements_of(&x.grad(&gradients).expect("a gradient"));
            assert_eq!(found, expected, "{dtype:?} on {device:?}");
        }
    }
}

#[test]
fn layers_of_one_input_have_the_results_of_each_alone() {
    for device in devices() {
        let of = |outputs, seed| {
            let mut tensors =
                Tensors::new([9, 12, outputs], (true, true), &device, FloatDType::F32);
            tensors.weight = matrix([12, outputs], 0.25, seed, &device, FloatDType::F32);
            tensors.tracked()
        };
        let input = matrix([9, 12], 1.0, 1, &device, FloatDType::F32);
        let run = |together: bool, used: usize| {
            let tensors = [of(8, 11), of(8, 12), of(20, 13)];
            let layers = tensors.each_ref().map(layer);
            let input = Tensor::<2>::from_inner(input.clone()).require_grad();
            let outputs = match together {
                true => Linear::forward_each(layers.each_ref(), input.clone()),
                false => layers.each_ref().map(|layer| layer.forward(input.clone())),
            };
            let square = |output: Tensor<2>| output.powi_scalar(2).sum();
            let loss = outputs.into_iter().take(used).map(square).reduce(|a, b| a + b);
            let gradients = loss.expect("a layer").backward();
            let of_input = elements_of(&input.grad(&gradients).expect("a gradient of the input"));
            let of_bias = tensors[0].bias.as_ref().expect("a bias").grad(&gradients);
            [of_input, elements_of(&of_bias.expect("a gradient of the bias"))]
        };
        for used in 1..=3 {
            for (found, expected) in run(true, used).iter().zip(run(false, used)) {
                let rounding = share(product_dtype(&device, FloatDType::F32));
                assert_rounded_by(rounding, found, &expected, &format!("{used}, {device:?}"));
            }
        }
    }
}

/// Two layers of one input.
#[derive(Module, FsdpModule, Debug)]
struct Pair {
    first: Linear,
    second: Linear,
}

/// Two layers whose adapters add `SCALE` times their input, which is dropped.
struct Dropped {
    pair: Pair,
    /// Weight and factors of each layer.
    params: [[Tensor<2>; 3]; 2],
    /// No element is zero: the mask is seen in each.
    input: Tensor<2>,
    weight: Tensor<2>,
    of_output: Tensor<2>,
}

impl Dropped {
    const ROWS: usize = 33;
    const WIDTH: usize = 12;
    const PROB: f64 = 0.25;
    const SCALE: f64 = 0.5;

    fn new(device: &Device, dtype: FloatDType) -> Self {
        let numbers = |rows, seed| matrix([rows, Self::WIDTH], 1.0, seed, device, dtype);
        let (weight, of_output) = (numbers(Self::WIDTH, 2), numbers(Self::ROWS, 3));
        let eye = Tensor::<2>::eye(Self::WIDTH, device).cast(dtype);
        let tracked = |matrix: &Tensor<2>| Tensor::<2>::from_inner(matrix.clone()).require_grad();
        let params = [(); 2].map(|()| [&weight, &eye, &eye].map(tracked));
        let config = LinearConfig::new(Self::WIDTH, Self::WIDTH).with_bias(false);
        let layer = || config.init(&device.clone().autodiff());
        let lora = LoraConfig::new(Self::WIDTH)
            .with_alpha(Self::SCALE * Self::WIDTH as f64)
            .with_dropout(Self::PROB);
        let pair = lora.apply(Pair { first: layer(), second: layer() }).expect("two layers");
        let pair = pair.map(&mut FillLeaves(params.clone().concat()));
        Self { pair, params, input: numbers(Self::ROWS, 1) + 2.0, weight, of_output }
    }

    /// Compares the gradients with those of the masks that the outputs show. Returns the masks.
    fn check(&self, together: bool) -> Vec<Vec<f64>> {
        let Self { pair, input, weight, of_output, .. } = self;
        let layers = [&pair.first, &pair.second];
        let x = Tensor::<2>::from_inner(input.clone()).require_grad();
        let outputs = match together {
            true => Linear::forward_each(layers, x.clone()),
            false => layers.map(|layer| layer.forward(x.clone())),
        };
        let weighted = |y: Tensor<2>| (y * Tensor::from_inner(of_output.clone())).sum();
        let [first, second] = outputs.clone().map(weighted);
        let gradients = (first + second).backward();
        let mut of_input = input.zeros_like();
        let mut masks = Vec::new();
        for ([_, factors @ ..], output) in self.params.iter().zip(outputs) {
            let added = output.inner() - input.clone().matmul(weight.clone());
            let kept = (added / (input.clone() * Self::SCALE)).greater_elem(0.5).float();
            let mask = kept.cast(input.dtype()) / (1.0 - Self::PROB);
            masks.push(elements_of(&mask));
            let dropped = (input.clone() * mask.clone()).transpose();
            let of_factor = elements_of(&(dropped.matmul(of_output.clone()) * Self::SCALE));
            for factor in factors {
                let found = factor.grad(&gradients).expect("a gradient of each factor");
                assert_rounded_by(1e-5, &elements_of(&found), &of_factor, "a factor");
            }
            of_input = of_input
                + of_output.clone().matmul(weight.clone().transpose())
                + of_output.clone() * mask * Self::SCALE;
        }
        let found = elements_of(&x.grad(&gradients).expect("a gradient of the input"));
        assert_rounded_by(1e-5, &found, &elements_of(&of_input), "the input");
        masks
    }
}

/// The mask of an adapter's input, as the output shows it, is that of the gradients. There is no kernel
/// for f64.
#[test]
fn dropout_of_an_adapters_input_has_one_mask_in_both_passes() {
    let with = |dtype| move |device: Device| (device, dtype);
    let cases = devices().map(with(FloatDType::F32));
    for (device, dtype) in cases.chain([Device::flex()].map(with(FloatDType::F64))) {
        let dropped = Dropped::new(&device, dtype);
        let Dropped { pair, input, weight, .. } = &dropped;
        let expected = input.clone().matmul(weight.clone()) + input.clone() * Dropped::SCALE;
        let valid = elements_of(&pair.valid().first.forward(input.clone()));
        assert_rounded_by(1e-5, &valid, &elements_of(&expected), "evaluation drops nothing");
        for together in [true, false] {
            let masks = dropped.check(together);
            assert_ne!(masks[0], masks[1], "each layer has a mask of its own");
            let zeros = masks.iter().flatten().filter(|element| **element == 0.0).count();
            let share = zeros as f64 / (2 * Dropped::ROWS * Dropped::WIDTH) as f64;
            assert!((share - Dropped::PROB).abs() < 0.06, "{share} in {dtype:?} on {device:?}");
        }
    }
}

#[test]
fn a_frozen_weight_and_an_input_without_a_gradient_get_none() {
    for device in devices() {
        let tensors = Tensors::new([5, 6, 4], (true, true), &device, FloatDType::F32);
        let mut tracked = tensors.clone().tracked();
        tracked.input = Tensor::from_inner(tensors.input);
        tracked.weight = Tensor::from_inner(tensors.weight);
        let output = layer(&tracked).forward(tracked.input.clone());
        let gradients = output.sum().backward();
        assert!(tracked.input.grad(&gradients).is_none());
        assert!(tracked.weight.grad(&gradients).is_none());
        for factor in tracked.factors.iter().flatten() {
            assert!(factor.grad(&gradients).is_some());
        }
    }
}

#[test]
fn rows_of_more_dimensions_and_other_strides_keep_their_order() {
    for device in devices() {
        let tensors = Tensors::new([24, 6, 4], (false, true), &device, FloatDType::F32);
        let Tensors { input, weight, bias, .. } = tensors;
        let apply = |input: Tensor<3>, weight: Tensor<2>| {
            linear(input, weight, bias.clone(), LinearActivation::Silu).into_data()
        };
        let expected = apply(input.clone().reshape([2, 12, 6]), weight.clone());
        let swapped = input.reshape([2, 12, 6]).swap_dims(0, 1);
        // The same numbers, in memory in another order.
        let contiguous = Tensor::<3>::from_data(swapped.to_data(), &device).swap_dims(0, 1);
        let transposed = Tensor::<2>::from_data(weight.clone().transpose().to_data(), &device);
        assert_eq!(apply(contiguous, transposed.transpose()), expected);
    }
}

#[test]
#[should_panic(expected = "the last dimension of the input must be `d_input`")]
fn an_input_of_another_width_is_refused() {
    let device = Device::flex();
    LinearConfig::new(3, 4).init(&device).forward(Tensor::<2>::zeros([2, 4], &device));
}

#[test]
#[should_panic(expected = "the bias must have an element for each output")]
fn a_bias_of_another_length_is_refused() {
    let zeros = |shape| Tensor::<2>::zeros(shape, &Device::flex());
    let bias = Tensor::zeros([3], &Device::flex());
    linear(zeros([2, 4]), zeros([4, 5]), Some(bias), LinearActivation::Identity);
}
