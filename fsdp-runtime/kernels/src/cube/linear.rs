//! The bias and the activation of a linear layer, and their gradients, in one kernel each. Computed in
//! f32, by the formulas of Flex.

use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::buffer_slice::BufferSlice;
use super::device::rounds_in_integers;
use super::gelu::{bell, distribution};
use super::rounding::narrowed;
use super::span::{Span, row_span};
use super::swiglu::logistic;
use super::tensors::{contiguous, element, empty};
use crate::linear::{GELU_CUBE, GELU_SLOPE, LinearActivation};

/// Returns the argument of the logistic function in the tanh approximation of the GELU.
#[cube]
fn gelu_argument<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    Vector::new(GELU_SLOPE) * (x + Vector::new(GELU_CUBE) * x * x * x)
}

/// Returns the activation of `x`.
#[cube]
fn activated<N: Size>(
    x: Vector<f32, N>,
    #[comptime] activation: LinearActivation,
) -> Vector<f32, N> {
    match comptime!(activation) {
        LinearActivation::Identity => x,
        LinearActivation::Gelu => x * distribution(x, bell(x)),
        LinearActivation::GeluTanh => x * logistic(gelu_argument(x)),
        LinearActivation::Relu => {
            let zero = Vector::<f32, N>::new(0.0f32);
            select_many(x.less_than(&zero), zero, x)
        }
        LinearActivation::Silu => x * logistic(x),
    }
}

/// Returns the derivative of the activation at `x`.
#[cube]
fn slope<N: Size>(x: Vector<f32, N>, #[comptime] activation: LinearActivation) -> Vector<f32, N> {
    let one = Vector::<f32, N>::new(1.0f32);
    match comptime!(activation) {
        LinearActivation::Identity => one,
        LinearActivation::Gelu => {
            let bell = bell(x);
            // 1 / √2π
            distribution(x, bell) + x * bell * Vector::new(0.398_942_3f32)
        }
        LinearActivation::GeluTanh => {
            let share = logistic(gelu_argument(x));
            let rise = one + Vector::new(comptime!(3.0 * GELU_CUBE)) * x * x;
            share + x * share * (one - share) * Vector::new(GELU_SLOPE) * rise
        }
        LinearActivation::Relu => {
            let zero = Vector::<f32, N>::new(0.0f32);
            select_many(zero.less_than(&x), one, zero)
        }
        LinearActivation::Silu => {
            let share = logistic(x);
            share + x * share * (one - share)
        }
    }
}

/// Where the vectors of a launch lie.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Place {
    from: usize,
    grads_from: usize,
    to: usize,
    /// Number of vectors.
    count: usize,
    /// Number of vectors of a row.
    row: usize,
}

/// Returns a vector of the product with its bias. `biases` has the bias, if there is one.
#[cube]
fn biased_vector<F: Float, N: Size>(
    product: &[Vector<F, N>],
    biases: &Sequence<Box<[Vector<F, N>]>>,
    firsts: &Sequence<usize>,
    place: &Place,
) -> Vector<f32, N> {
    let mut x = Vector::<f32, N>::cast_from(product[place.from + ABSOLUTE_POS]);
    #[unroll]
    for at in 0..biases.len() {
        x += Vector::cast_from(biases[at][firsts[at] + ABSOLUTE_POS % place.row]);
    }
    x
}

#[cube(launch_unchecked)]
fn biased_kernel<F: Float, N: Size>(
    product: &[Vector<F, N>],
    biases: &Sequence<Box<[Vector<F, N>]>>,
    target: &mut [Vector<F, N>],
    firsts: &Sequence<usize>,
    place: Place,
    #[comptime] activation: LinearActivation,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < place.count {
        let x = biased_vector(product, biases, firsts, &place);
        target[place.to + ABSOLUTE_POS] = narrowed(activated(x, activation), integers);
    }
}

#[cube(launch_unchecked)]
fn biased_backward_kernel<F: Float, N: Size>(
    product: &[Vector<F, N>],
    biases: &Sequence<Box<[Vector<F, N>]>>,
    grads: &[Vector<F, N>],
    target: &mut [Vector<F, N>],
    firsts: &Sequence<usize>,
    place: Place,
    #[comptime] activation: LinearActivation,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < place.count {
        let x = biased_vector(product, biases, firsts, &place);
        let grad = Vector::<f32, N>::cast_from(grads[place.grads_from + ABSOLUTE_POS]);
        target[place.to + ABSOLUTE_POS] = narrowed(grad * slope(x, activation), integers);
    }
}

/// Buffers of a launch.
struct Launch {
    product: CubeTensor,
    bias: Option<CubeTensor>,
    target: CubeTensor,
    span: Span,
    row_len: usize,
}

impl Launch {
    /// Prepares a launch that also reads `grad`, if there is one.
    fn new(product: CubeTensor, bias: Option<CubeTensor>, grad: Option<&CubeTensor>) -> Self {
        let (product, bias) = (contiguous(product), bias.map(contiguous));
        let target = empty(&product, product.shape(), product.dtype);
        let (numel, row_len) = (product.shape().num_elements(), product.shape()[1]);
        let tensors: Vec<_> =
            [&product, &target].into_iter().chain(grad).map(BufferSlice::of).collect();
        let biases: Vec<_> = bias.iter().map(BufferSlice::of).collect();
        let (tensors, biases) =
            (tensors.iter().collect::<Vec<_>>(), biases.iter().collect::<Vec<_>>());
        let span = row_span(&product.client, &tensors, &biases, numel, row_len);
        Self { product, bias, target, span, row_len }
    }

    /// Returns the bias, if there is one, and the index of its first vector.
    fn bias(&self) -> (Vec<BufferArg>, Vec<usize>) {
        self.bias.iter().map(|bias| self.span.argument(&BufferSlice::of(bias))).unzip()
    }
}

/// Implements [`Kernels::biased`](crate::Kernels::biased).
pub(super) fn forward(
    product: CubeTensor,
    bias: Option<CubeTensor>,
    activation: LinearActivation,
) -> CubeTensor {
    if activation == LinearActivation::Identity && bias.is_none() {
        return product;
    }
    let launch = Launch::new(product, bias, None);
    let (client, dtype, span) = (launch.product.client.clone(), launch.product.dtype, &launch.span);
    let (count, dim) = span.grid(&client);
    let (read, from) = span.argument(&BufferSlice::of(&launch.product));
    let (write, to) = span.argument(&BufferSlice::of(&launch.target));
    let (biases, firsts) = launch.bias();
    // SAFETY: `row_span` checked that the buffers hold the rows and the bias; the kernel accesses only
    // these.
    unsafe {
        biased_kernel::launch_unchecked(
            &client,
            count,
            dim,
            span.width,
            read,
            biases.into_iter().collect(),
            write,
            firsts.into_iter().collect(),
            PlaceLaunch::new(from, 0, to, span.count, launch.row_len / span.width),
            activation,
            rounds_in_integers(&client, dtype),
            element(dtype),
        );
    }
    launch.target
}

/// Implements [`Kernels::biased_backward`](crate::Kernels::biased_backward).
pub(super) fn backward(
    product: CubeTensor,
    bias: Option<CubeTensor>,
    grad: CubeTensor,
    activation: LinearActivation,
) -> CubeTensor {
    if activation == LinearActivation::Identity {
        return grad;
    }
    let grad = contiguous(grad);
    let launch = Launch::new(product, bias, Some(&grad));
    let (client, dtype, span) = (launch.product.client.clone(), launch.product.dtype, &launch.span);
    let (count, dim) = span.grid(&client);
    let (read, from) = span.argument(&BufferSlice::of(&launch.product));
    let (grads, grads_from) = span.argument(&BufferSlice::of(&grad));
    let (write, to) = span.argument(&BufferSlice::of(&launch.target));
    let (biases, firsts) = launch.bias();
    // SAFETY: `row_span` checked that the buffers hold the rows and the bias; the kernel accesses only
    // these.
    unsafe {
        biased_backward_kernel::launch_unchecked(
            &client,
            count,
            dim,
            span.width,
            read,
            biases.into_iter().collect(),
            grads,
            write,
            firsts.into_iter().collect(),
            PlaceLaunch::new(from, grads_from, to, span.count, launch.row_len / span.width),
            activation,
            rounds_in_integers(&client, dtype),
            element(dtype),
        );
    }
    launch.target
}
