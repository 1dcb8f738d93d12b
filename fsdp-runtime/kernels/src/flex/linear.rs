//! The bias and the activation of a linear layer, their gradients, and the sums of columns, in one pass
//! over memory each.

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use burn::tensor::{Shape, TensorData};
use multiversion::multiversion;
use rayon::prelude::*;

use super::float::{KernelFloat, slice};
use super::gelu::normal;
use super::loops::indexed;
use super::new_tensor::{Uninit, new_tensor_in_parts};
use super::rows::{row_len, task_len};
use super::swiglu::logistic;
use crate::linear::{GELU_CUBE, GELU_SLOPE, LinearActivation};

/// Implements [`Kernels::biased`](crate::Kernels::biased) for a product that no other tensor shares, and
/// the identity.
pub(super) fn add_bias<E: KernelFloat>(product: &mut [E], bias: &[E]) {
    let rows = product.par_chunks_mut(task_len(bias.len()));
    rows.for_each(|rows| add_bias_rows(rows, bias));
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
fn add_bias_rows<E: KernelFloat>(rows: &mut [E], bias: &[E]) {
    for row in rows.chunks_exact_mut(bias.len()) {
        for at in 0..bias.len() {
            row[at] = E::narrow(row[at].wide() + bias[at].wide());
        }
    }
}

/// Implements [`Kernels::biased`](crate::Kernels::biased). The tensors are contiguous.
pub(super) fn forward<E: KernelFloat>(
    product: &FlexTensor,
    bias: Option<&FlexTensor>,
    activation: LinearActivation,
) -> FlexTensor {
    let (input, bias) = (slice::<E>(product), bias.map(slice::<E>));
    new_tensor_in_parts(product.shape(), task_len(row_len(product)), |at, output| {
        (forward_rows(&input[at..], bias, row_len(product), output, activation), ())
    })
    .0
}

/// Implements [`Kernels::biased_backward`](crate::Kernels::biased_backward). The tensors are contiguous.
pub(super) fn backward<E: KernelFloat>(
    product: &FlexTensor,
    bias: Option<&FlexTensor>,
    grad: &FlexTensor,
    activation: LinearActivation,
) -> FlexTensor {
    let (input, bias, grads) = (slice::<E>(product), bias.map(slice::<E>), slice::<E>(grad));
    new_tensor_in_parts(product.shape(), task_len(row_len(product)), |at, output| {
        let rows = [&input[at..], &grads[at..]];
        (backward_rows(rows, bias, row_len(product), output, activation), ())
    })
    .0
}

/// Returns the sums of the columns of a contiguous matrix, in f32. Each task adds its rows in order, and
/// the tasks' sums are added in order.
pub(super) fn column_sums<E: KernelFloat>(matrix: &FlexTensor) -> FlexTensor {
    let len = row_len(matrix);
    let tasks = slice::<E>(matrix).par_chunks(task_len(len));
    let sums: Vec<Vec<f32>> = tasks.map(|rows| sums_of_rows(rows, len)).collect();
    let add = |mut total: Vec<f32>, sums: Vec<f32>| {
        total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
        total
    };
    let sums = sums.into_iter().reduce(add).unwrap_or_else(|| vec![0.0; len]);
    FlexTensor::from_data(TensorData::new(sums, Shape::from([len])))
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
fn sums_of_rows<E: KernelFloat>(rows: &[E], len: usize) -> Vec<f32> {
    let mut sums = vec![0f32; len];
    for row in rows.chunks_exact(len) {
        for at in 0..len {
            sums[at] += row[at].wide();
        }
    }
    sums
}

/// Writes the activations of the rows at the start of `input`, as many as `output` has.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
fn forward_rows<'a, E: KernelFloat>(
    input: &[E],
    bias: Option<&[E]>,
    len: usize,
    output: &'a mut Uninit<E>,
    activation: LinearActivation,
) -> &'a mut [E] {
    match activation {
        LinearActivation::Identity => each_row(input, bias, len, output, |_, x| x),
        LinearActivation::Gelu => each_row(input, bias, len, output, |_, x| x * normal(x).0),
        LinearActivation::GeluTanh => {
            each_row(input, bias, len, output, |_, x| x * logistic(gelu_argument(x)))
        }
        // Unlike `f32::max` this keeps a NaN.
        LinearActivation::Relu => {
            each_row(input, bias, len, output, |_, x| if x < 0.0 { 0.0 } else { x })
        }
        LinearActivation::Silu => each_row(input, bias, len, output, |_, x| x * logistic(x)),
    }
}

/// Writes the gradients of the rows at the start of `input`, as many as `output` has, given those of
/// their activations.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
fn backward_rows<'a, E: KernelFloat>(
    [input, grads]: [&[E]; 2],
    bias: Option<&[E]>,
    len: usize,
    output: &'a mut Uninit<E>,
    activation: LinearActivation,
) -> &'a mut [E] {
    let grads = &grads[..output.len()];
    let grad = |at: usize| grads[at].wide();
    match activation {
        LinearActivation::Identity => each_row(input, bias, len, output, |at, _| grad(at)),
        LinearActivation::Gelu => each_row(input, bias, len, output, |at, x| {
            let (distribution, density) = normal(x);
            grad(at) * (distribution + x * density)
        }),
        LinearActivation::GeluTanh => each_row(input, bias, len, output, |at, x| {
            let share = logistic(gelu_argument(x));
            let rise = GELU_SLOPE * (1.0 + 3.0 * GELU_CUBE * x * x);
            grad(at) * (share + x * share * (1.0 - share) * rise)
        }),
        LinearActivation::Relu => {
            each_row(input, bias, len, output, |at, x| if x > 0.0 { grad(at) } else { 0.0 })
        }
        LinearActivation::Silu => each_row(input, bias, len, output, |at, x| {
            let share = logistic(x);
            grad(at) * (share + x * share * (1.0 - share))
        }),
    }
}

/// Writes `f(i, x + bias)` to each element i of `output`, where x is that of `input`.
#[inline(always)]
fn each_row<'a, E: KernelFloat>(
    input: &[E],
    bias: Option<&[E]>,
    len: usize,
    output: &'a mut Uninit<E>,
    f: impl Fn(usize, f32) -> f32,
) -> &'a mut [E] {
    let rows = input.chunks_exact(len).zip(output.chunks_exact_mut(len));
    for (row, (x, y)) in rows.enumerate() {
        let first = row * len;
        match bias {
            None => indexed(x, y, |at, x| E::narrow(f(first + at, x.wide()))),
            Some(bias) => {
                let bias = &bias[..len];
                indexed(x, y, |at, x| E::narrow(f(first + at, x.wide() + bias[at].wide())))
            }
        };
    }
    // SAFETY: `indexed` wrote every element of each row, and `output` consists of rows.
    unsafe { output.assume_init_mut() }
}

/// Returns the argument of the logistic function in the tanh approximation of the GELU.
#[inline(always)]
fn gelu_argument(x: f32) -> f32 {
    GELU_SLOPE * (x + GELU_CUBE * x * x * x)
}
