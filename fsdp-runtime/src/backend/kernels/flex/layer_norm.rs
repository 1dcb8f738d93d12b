//! Layer normalization and its gradients, each in one pass over the rows.
//!
//! A task of the thread pool takes a group of rows, whose number depends on the length of a row only.
//! The results therefore have the same bits on any number of threads.

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use burn::tensor::{Shape, TensorData};
use multiversion::multiversion;
use rayon::prelude::*;

use super::new_tensor::{TASK, Uninit};
use crate::backend::kernels::contract::SavedLayerNorm;

/// Number of sums that are computed side by side, in the registers of one or two vectors.
const LANES: usize = 32;

/// Returns the number of rows of a task.
fn group(features: usize) -> usize {
    (TASK / features).max(1)
}

/// Returns the elements of a contiguous f32 tensor.
fn elements(tensor: &FlexTensor) -> &[f32] {
    tensor.as_slice().expect("a contiguous f32 tensor")
}

fn tensor(elements: Vec<f32>, shape: Shape) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(elements, shape))
}

/// Implements [`Kernels::layer_norm`](crate::backend::kernels::Kernels::layer_norm), for f32.
pub(super) fn forward(
    x: &FlexTensor,
    gamma: &FlexTensor,
    beta: Option<&FlexTensor>,
    epsilon: f32,
) -> [FlexTensor; 2] {
    let (shape, x, gamma) = (x.shape(), x.to_contiguous(), gamma.to_contiguous());
    let (x, gamma) = (elements(&x), elements(&gamma));
    let beta = beta.map(FlexTensor::to_contiguous);
    let zeros = vec![0.0; if beta.is_none() { gamma.len() } else { 0 }];
    let beta = beta.as_ref().map_or(zeros.as_slice(), elements);
    let (features, rows) = (gamma.len(), x.len() / gamma.len());
    let mut output = Vec::with_capacity(x.len());
    let mut stats = Vec::with_capacity(rows * 2);
    {
        let output = &mut output.spare_capacity_mut()[..x.len()];
        let stats = &mut stats.spare_capacity_mut()[..rows * 2];
        let group = group(features);
        if rows <= group {
            normalize([x, gamma, beta], epsilon, output, stats);
        } else {
            let output = output.par_chunks_mut(group * features);
            let parts = output.zip(stats.par_chunks_mut(group * 2));
            x.par_chunks(group * features).zip(parts).for_each(|(x, (output, stats))| {
                normalize([x, gamma, beta], epsilon, output, stats);
            });
        }
    }
    // SAFETY: `normalize` has written every element of each part, and the parts cover both.
    unsafe {
        output.set_len(x.len());
        stats.set_len(rows * 2);
    }
    [tensor(output, shape), tensor(stats, Shape::from([rows, 2]))]
}

/// Implements [`Kernels::layer_norm_backward`](crate::backend::kernels::Kernels::layer_norm_backward),
/// for f32.
pub(super) fn backward(saved: &SavedLayerNorm<FlexTensor>, grad: &FlexTensor) -> [FlexTensor; 3] {
    let SavedLayerNorm { x, gamma, stats } = saved;
    let (shape, columns) = (x.shape(), gamma.shape());
    let [x, gamma, stats, grad] = [x, gamma, stats, grad].map(FlexTensor::to_contiguous);
    let [x, gamma, stats, grad] = [&x, &gamma, &stats, &grad].map(elements);
    let (features, rows) = (gamma.len(), x.len() / gamma.len());
    let group = group(features);
    let mut output = Vec::with_capacity(x.len());
    // For each group of rows: its sum of the gradients of `gamma`, then of `beta`.
    let mut sums = vec![0.0; rows.div_ceil(group) * 2 * features];
    {
        let output = &mut output.spare_capacity_mut()[..x.len()];
        if rows <= group {
            differentiate([x, gamma, stats, grad], output, &mut sums);
        } else {
            let tasks = output.par_chunks_mut(group * features);
            let tasks = tasks.zip(sums.par_chunks_mut(2 * features)).enumerate();
            tasks.for_each(|(index, (output, sums))| {
                let (first, last) = (index * group, (index * group + group).min(rows));
                let elements = first * features..last * features;
                let stats = &stats[first * 2..last * 2];
                let (x, grad) = (&x[elements.clone()], &grad[elements]);
                differentiate([x, gamma, stats, grad], output, sums);
            });
        }
    }
    // SAFETY: `differentiate` has written every element of each part, and the parts cover all.
    unsafe { output.set_len(x.len()) };
    let mut groups = sums.chunks_exact(2 * features);
    let mut total = groups.next().map_or_else(Vec::new, <[f32]>::to_vec);
    for group in groups {
        total.iter_mut().zip(group).for_each(|(total, sum)| *total += sum);
    }
    let beta = total.split_off(features);
    [tensor(output, shape), tensor(total, columns.clone()), tensor(beta, columns)]
}

/// Adds `f(i)` for each index below `len`, in [`LANES`] sums.
#[inline(always)]
fn sum(len: usize, f: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let whole = len / LANES * LANES;
    let mut first = 0;
    while first < whole {
        for lane in 0..LANES {
            lanes[lane] += f(first + lane);
        }
        first += LANES;
    }
    for at in whole..len {
        lanes[at - whole] += f(at);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Normalizes rows of `x` with `gamma` and `beta`. Writes all of `output` and `stats`.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn normalize(
    [x, gamma, beta]: [&[f32]; 3],
    epsilon: f32,
    output: &mut Uninit<f32>,
    stats: &mut Uninit<f32>,
) {
    let features = gamma.len();
    let beta = &beta[..features];
    assert_eq!((x.len(), stats.len()), (output.len(), output.len() / features * 2));
    let rows = x.chunks_exact(features).zip(output.chunks_exact_mut(features));
    for ((x, output), stats) in rows.zip(stats.chunks_exact_mut(2)) {
        let count = features as f32;
        let mean = sum(features, |at| x[at]) / count;
        let variance = sum(features, |at| (x[at] - mean) * (x[at] - mean)) / count;
        let scale = 1.0 / (variance + epsilon).sqrt();
        for at in 0..features {
            output[at].write((x[at] - mean) * scale * gamma[at] + beta[at]);
        }
        stats[0].write(mean);
        stats[1].write(scale);
    }
}

/// Computes the gradients of rows of `x`, and adds those of `gamma` and `beta` to `sums`. Writes all
/// of `output`.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn differentiate([x, gamma, stats, grad]: [&[f32]; 4], output: &mut Uninit<f32>, sums: &mut [f32]) {
    let features = gamma.len();
    assert_eq!((x.len(), grad.len()), (output.len(), output.len()));
    assert_eq!(stats.len(), output.len() / features * 2);
    let (gamma_sums, beta_sums) = sums.split_at_mut(features);
    let (gamma_sums, beta_sums) = (&mut gamma_sums[..features], &mut beta_sums[..features]);
    let rows = x.chunks_exact(features).zip(grad.chunks_exact(features));
    let rows = rows.zip(output.chunks_exact_mut(features)).zip(stats.chunks_exact(2));
    for (((x, grad), output), stats) in rows {
        let (mean, scale) = (stats[0], stats[1]);
        let count = features as f32;
        let normalized = |at: usize| (x[at] - mean) * scale;
        let along = sum(features, |at| grad[at] * gamma[at] * normalized(at)) / count;
        let constant = sum(features, |at| grad[at] * gamma[at]) / count;
        for at in 0..features {
            let (normalized, grad) = (normalized(at), grad[at]);
            output[at].write(scale * (grad * gamma[at] - constant - normalized * along));
            gamma_sums[at] += grad * normalized;
            beta_sums[at] += grad;
        }
    }
}
