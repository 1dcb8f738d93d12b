//! Adam, AdamW and SGD, each a launch a tensor: it reads the parameter, its gradient and its state
//! once and writes them once, in place.
//!
//! The operations and their order are those of the loops on Flex, one rounding each, so that both
//! give the same bits on a device whose division and square root round correctly.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{Run, rounded, spans};
use crate::kernels::AdamTensors;
use crate::optim::{AdamStep, SgdStep};

#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Adam {
    beta_1: f32,
    rest_1: f32,
    beta_2: f32,
    rest_2: f32,
    epsilon: f32,
    root_scale: f32,
    step_size: f32,
    penalty: f32,
    keep: f32,
    rate: f32,
}

#[cube(launch_unchecked)]
fn adam_kernel<N: Size>(
    param: &mut [Vector<f32, N>],
    grad: &[Vector<f32, N>],
    moment_1: &mut [Vector<f32, N>],
    moment_2: &mut [Vector<f32, N>],
    max: &mut [Vector<f32, N>],
    firsts: &Sequence<usize>,
    count: usize,
    step: Adam,
    zero: u32,
    #[comptime] amsgrad: bool,
    #[comptime] cautious: bool,
) {
    if ABSOLUTE_POS < count {
        let p = param[firsts[0] + ABSOLUTE_POS];
        let g = grad[firsts[1] + ABSOLUTE_POS];
        let m = moment_1[firsts[2] + ABSOLUTE_POS];
        let v = moment_2[firsts[3] + ABSOLUTE_POS];

        let g = g + rounded(p * Vector::new(step.penalty), zero);
        let m = rounded(m * Vector::new(step.beta_1), zero)
            + rounded(g * Vector::new(step.rest_1), zero);
        let square = rounded(g * g, zero);
        let v = rounded(v * Vector::new(step.beta_2), zero)
            + rounded(square * Vector::new(step.rest_2), zero);
        moment_1[firsts[2] + ABSOLUTE_POS] = m;
        moment_2[firsts[3] + ABSOLUTE_POS] = v;

        let mut largest = v;
        if comptime!(amsgrad) {
            let before = max[firsts[4] + ABSOLUTE_POS];
            // Not a number wins.
            largest = select_many(before.greater_equal(&v), before, v);
            max[firsts[4] + ABSOLUTE_POS] = largest;
        }
        let mut kept = rounded(p * Vector::new(step.keep), zero);
        if comptime!(cautious) {
            let nothing = Vector::new(0.0f32);
            let one = Vector::<u32, N>::new(1u32);
            let none = Vector::<u32, N>::new(0u32);
            let up = select_many(p.greater_equal(&nothing), one, none);
            let along = select_many(m.greater_equal(&nothing), one, none);
            let decayed = p - rounded(p * Vector::new(step.rate), zero);
            kept = select_many(up.equal(&along), decayed, p);
        }
        let root = rounded(Vector::sqrt(largest) * Vector::new(step.root_scale), zero);
        let update =
            rounded(Vector::new(step.step_size) * m, zero) / (root + Vector::new(step.epsilon));
        param[firsts[0] + ABSOLUTE_POS] = kept - update;
    }
}

/// The runs of tensors of one step.
///
/// # Panics
///
/// Where one is not f32 or has another number of elements than the first.
fn runs<const M: usize>(tensors: [&CubeTensor; M]) -> ([Run; M], usize) {
    let numel = tensors[0].shape().num_elements();
    for tensor in tensors {
        let found = (tensor.dtype, tensor.shape().num_elements());
        assert_eq!(found, (DType::F32, numel), "the tensors of a step are f32 and of one length");
    }
    (tensors.map(Run::of), numel)
}

/// One step of Adam or AdamW on contiguous tensors of one length, in their own memory.
pub(crate) fn adam(step: &AdamStep, grad: &CubeTensor, tensors: &AdamTensors<CubeTensor>) {
    let AdamTensors { param, moment_1, moment_2, max } = tensors;
    let client = param.client.clone();
    let largest = max.as_ref().unwrap_or(moment_2);
    let (runs, numel) = runs([param, grad, moment_1, moment_2, largest]);
    for span in spans(&client, &runs.each_ref(), numel) {
        let (count, dim) = span.grid(&client);
        let [(p, p0), (g, g0), (m, m0), (v, v0), (largest, max0)] =
            runs.each_ref().map(|run| span.argument(run));
        // A buffer is bound once.
        let largest = if max.is_some() { largest } else { BufferArg::alias(3, v.len()) };
        let step_args = AdamLaunch::new(
            step.beta_1,
            step.rest_1,
            step.beta_2,
            step.rest_2,
            step.epsilon,
            step.root_scale,
            step.step_size,
            step.penalty,
            step.keep,
            step.rate,
        );
        // SAFETY: `spans` has checked that every buffer holds the elements, of which the kernel
        // touches `count` vectors.
        unsafe {
            adam_kernel::launch_unchecked(
                &client,
                count,
                dim,
                span.width,
                p,
                g,
                m,
                v,
                largest,
                [p0, g0, m0, v0, max0].into(),
                span.count,
                step_args,
                0,
                max.is_some(),
                step.cautious,
            );
        }
    }
}

#[cube(launch_unchecked)]
fn sgd_kernel<N: Size>(
    param: &mut [Vector<f32, N>],
    grad: &[Vector<f32, N>],
    velocity: &mut [Vector<f32, N>],
    firsts: &Sequence<usize>,
    count: usize,
    lr: f32,
    penalty: f32,
    momentum: f32,
    rest: f32,
    zero: u32,
    #[comptime] with_momentum: bool,
    #[comptime] nesterov: bool,
) {
    if ABSOLUTE_POS < count {
        let p = param[firsts[0] + ABSOLUTE_POS];
        let g = grad[firsts[1] + ABSOLUTE_POS];
        let g = g + rounded(p * Vector::new(penalty), zero);
        let mut along = g;
        if comptime!(with_momentum) {
            let b = velocity[firsts[2] + ABSOLUTE_POS];
            let b = rounded(b * Vector::new(momentum), zero) + rounded(g * Vector::new(rest), zero);
            velocity[firsts[2] + ABSOLUTE_POS] = b;
            if comptime!(nesterov) {
                along = g + rounded(b * Vector::new(momentum), zero);
            } else {
                along = b;
            }
        }
        param[firsts[0] + ABSOLUTE_POS] = p - rounded(along * Vector::new(lr), zero);
    }
}

/// One step of SGD on contiguous tensors of one length, in the memory of all but `grad`.
pub(crate) fn sgd(
    step: &SgdStep,
    param: &CubeTensor,
    grad: &CubeTensor,
    velocity: Option<&CubeTensor>,
) {
    let client = param.client.clone();
    let (runs, numel) = runs([param, grad, velocity.unwrap_or(param)]);
    for span in spans(&client, &runs.each_ref(), numel) {
        let (count, dim) = span.grid(&client);
        let [(p, p0), (g, g0), (b, b0)] = runs.each_ref().map(|run| span.argument(run));
        // A buffer is bound once.
        let b = if velocity.is_some() { b } else { BufferArg::alias(0, p.len()) };
        // SAFETY: `spans` has checked that every buffer holds the elements, of which the kernel
        // touches `count` vectors.
        unsafe {
            sgd_kernel::launch_unchecked(
                &client,
                count,
                dim,
                span.width,
                p,
                g,
                b,
                [p0, g0, b0].into(),
                span.count,
                step.lr,
                step.penalty,
                step.momentum,
                step.rest,
                0,
                velocity.is_some(),
                step.nesterov,
            );
        }
    }
}
