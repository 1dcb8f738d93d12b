//! Adam, AdamW and SGD: each tensor is read once, with its gradient and state, and written once, in
//! place. Tensors of one step share launches where they may wait for each other.
//!
//! The operations and their order are those of the loops on Flex, one rounding each, so that both
//! give the same bits on a device whose division and square root round correctly.

use std::cell::RefCell;

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::batch::{Job, Tile, batches, begin, end, own_tile};
use super::{Run, rounded};
use crate::backend::kernels::AdamTensors;
use crate::backend::kernels::{AdamStep, SgdStep};

/// Tensors that share a launch, at most: the kernel's body is there once for each.
const MOST: usize = 8;

/// A step on some tensors, the parameter first: those a launch may be shared with are alike in `step`,
/// in how many they are and in their device.
struct Pending<S> {
    step: S,
    tensors: Vec<CubeTensor>,
}

thread_local! {
    static ADAM: RefCell<Vec<Pending<AdamStep>>> = const { RefCell::new(Vec::new()) };
    static SGD: RefCell<Vec<Pending<SgdStep>>> = const { RefCell::new(Vec::new()) };
}

/// Takes the first of the pending steps and those that are like it.
fn alike<S: PartialEq + Copy>(pending: &mut Vec<Pending<S>>) -> Option<(S, Vec<Vec<CubeTensor>>)> {
    if pending.is_empty() {
        return None;
    }
    let Pending { step, tensors } = pending.remove(0);
    let (count, device) = (tensors.len(), tensors[0].device.clone());
    let like = |other: &mut Pending<S>| {
        other.step == step && other.tensors.len() == count && other.tensors[0].device == device
    };
    let others = pending.extract_if(.., like).map(|other| other.tensors);
    Some((step, std::iter::once(tensors).chain(others).collect()))
}

/// Does what this thread has put off.
pub(crate) fn flush() {
    ADAM.with_borrow_mut(|pending| {
        while let Some((step, tensors)) = alike(pending) {
            launch_adam(&step, &tensors);
        }
    });
    SGD.with_borrow_mut(|pending| {
        while let Some((step, tensors)) = alike(pending) {
            launch_sgd(&step, &tensors);
        }
    });
}

/// Forgets what this thread has put off.
pub(crate) fn discard() {
    ADAM.with_borrow_mut(Vec::clear);
    SGD.with_borrow_mut(Vec::clear);
}

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
    params: &mut Sequence<Box<[Vector<f32, N>]>>,
    grads: &Sequence<Box<[Vector<f32, N>]>>,
    moments_1: &mut Sequence<Box<[Vector<f32, N>]>>,
    moments_2: &mut Sequence<Box<[Vector<f32, N>]>>,
    maxes: &mut Sequence<Box<[Vector<f32, N>]>>,
    param_firsts: &Sequence<usize>,
    grad_firsts: &Sequence<usize>,
    moment_1_firsts: &Sequence<usize>,
    moment_2_firsts: &Sequence<usize>,
    max_firsts: &Sequence<usize>,
    counts: &Sequence<usize>,
    tiles: &Sequence<usize>,
    step: Adam,
    zero: u32,
    #[comptime] amsgrad: bool,
    #[comptime] cautious: bool,
    #[comptime] tile: Tile,
) {
    let mut at = own_tile(tile);
    #[unroll]
    for part in 0..counts.len() {
        if at < tiles[part] {
            let end = end(at, counts[part], tile);
            let mut index = begin(at, tile);
            while index < end {
                let p = params[part][param_firsts[part] + index];
                let g = grads[part][grad_firsts[part] + index];
                let m = moments_1[part][moment_1_firsts[part] + index];
                let v = moments_2[part][moment_2_firsts[part] + index];

                let g = g + rounded(p * Vector::new(step.penalty), zero);
                let m = rounded(m * Vector::new(step.beta_1), zero)
                    + rounded(g * Vector::new(step.rest_1), zero);
                let square = rounded(g * g, zero);
                let v = rounded(v * Vector::new(step.beta_2), zero)
                    + rounded(square * Vector::new(step.rest_2), zero);
                moments_1.index_mut(part)[moment_1_firsts[part] + index] = m;
                moments_2.index_mut(part)[moment_2_firsts[part] + index] = v;

                let mut largest = v;
                if comptime!(amsgrad) {
                    let before = maxes[part][max_firsts[part] + index];
                    // Not a number wins.
                    largest = select_many(before.greater_equal(&v), before, v);
                    maxes.index_mut(part)[max_firsts[part] + index] = largest;
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
                let update = rounded(Vector::new(step.step_size) * m, zero)
                    / (root + Vector::new(step.epsilon));
                params.index_mut(part)[param_firsts[part] + index] = kept - update;
                index += comptime!(tile.lanes);
            }
        }
        // Below 0 it wraps, beyond every count.
        at -= tiles[part];
    }
}

/// The runs of tensors of one step, in the order of the first `K`; where there are fewer, the last
/// again.
///
/// # Panics
///
/// Where one is not f32 or has another number of elements than the first.
fn jobs<const K: usize>(steps: &[Vec<CubeTensor>]) -> Vec<Job<K>> {
    let job = |tensors: &Vec<CubeTensor>| {
        let numel = tensors[0].shape().num_elements();
        for tensor in tensors {
            let found = (tensor.dtype, tensor.shape().num_elements());
            let expected = (DType::F32, numel);
            assert_eq!(found, expected, "the tensors of a step are f32 and of one length");
        }
        let run = |index: usize| Run::of(&tensors[index.min(tensors.len() - 1)]);
        Job { runs: std::array::from_fn(run), numel }
    };
    steps.iter().map(job).collect()
}

/// One step of Adam or AdamW on contiguous tensors of one length, in their own memory: at once, or at
/// the next [`flush`].
pub(crate) fn adam(
    step: &AdamStep,
    grad: CubeTensor,
    tensors: &AdamTensors<CubeTensor>,
    later: bool,
) {
    let AdamTensors { param, moment_1, moment_2, max } = tensors;
    let tensors = [param, &grad, moment_1, moment_2].into_iter().chain(max).cloned().collect();
    if !later {
        return launch_adam(step, &[tensors]);
    }
    let pending = Pending { step: *step, tensors };
    if push(&ADAM, pending) >= MOST {
        flush();
    }
}

/// Puts a step off, and says how many are.
fn push<S>(
    steps: &'static std::thread::LocalKey<RefCell<Vec<Pending<S>>>>,
    step: Pending<S>,
) -> usize {
    steps.with_borrow_mut(|steps| {
        steps.push(step);
        steps.len()
    })
}

/// A step on the tensors of each, in the order of [`adam`].
fn launch_adam(step: &AdamStep, steps: &[Vec<CubeTensor>]) {
    let client = steps[0][0].client.clone();
    let amsgrad = steps[0].len() == 5;
    let jobs = jobs::<5>(steps);
    for batch in batches(&client, &jobs, None, MOST) {
        let (count, dim) = batch.grid(&client);
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
        // A buffer is bound once: none stand for what there is not.
        let (maxes, max_firsts) = match amsgrad {
            true => (batch.buffers(4), batch.firsts(4)),
            false => (SequenceArg::new(), SequenceArg::new()),
        };
        // SAFETY: `batches` has checked that the buffers hold the jobs' elements, of which the kernel
        // touches those of the batch's spans.
        unsafe {
            adam_kernel::launch_unchecked(
                &client,
                count,
                dim,
                batch.width,
                batch.buffers(0),
                batch.buffers(1),
                batch.buffers(2),
                batch.buffers(3),
                maxes,
                batch.firsts(0),
                batch.firsts(1),
                batch.firsts(2),
                batch.firsts(3),
                max_firsts,
                batch.counts(),
                batch.tiles(),
                step_args,
                0,
                amsgrad,
                step.cautious,
                batch.tile,
            );
        }
    }
}

#[cube(launch_unchecked)]
fn sgd_kernel<N: Size>(
    params: &mut Sequence<Box<[Vector<f32, N>]>>,
    grads: &Sequence<Box<[Vector<f32, N>]>>,
    velocities: &mut Sequence<Box<[Vector<f32, N>]>>,
    param_firsts: &Sequence<usize>,
    grad_firsts: &Sequence<usize>,
    velocity_firsts: &Sequence<usize>,
    counts: &Sequence<usize>,
    tiles: &Sequence<usize>,
    lr: f32,
    penalty: f32,
    momentum: f32,
    rest: f32,
    zero: u32,
    #[comptime] with_momentum: bool,
    #[comptime] nesterov: bool,
    #[comptime] tile: Tile,
) {
    let mut at = own_tile(tile);
    #[unroll]
    for part in 0..counts.len() {
        if at < tiles[part] {
            let end = end(at, counts[part], tile);
            let mut index = begin(at, tile);
            while index < end {
                let p = params[part][param_firsts[part] + index];
                let g = grads[part][grad_firsts[part] + index];
                let g = g + rounded(p * Vector::new(penalty), zero);
                let mut along = g;
                if comptime!(with_momentum) {
                    let b = velocities[part][velocity_firsts[part] + index];
                    let b = rounded(b * Vector::new(momentum), zero)
                        + rounded(g * Vector::new(rest), zero);
                    velocities.index_mut(part)[velocity_firsts[part] + index] = b;
                    if comptime!(nesterov) {
                        along = g + rounded(b * Vector::new(momentum), zero);
                    } else {
                        along = b;
                    }
                }
                params.index_mut(part)[param_firsts[part] + index] =
                    p - rounded(along * Vector::new(lr), zero);
                index += comptime!(tile.lanes);
            }
        }
        at -= tiles[part];
    }
}

/// One step of SGD on contiguous tensors of one length, in the memory of all but `grad`: at once, or
/// at the next [`flush`].
pub(crate) fn sgd(
    step: &SgdStep,
    param: &CubeTensor,
    grad: CubeTensor,
    velocity: Option<&CubeTensor>,
    later: bool,
) {
    let tensors = [param, &grad].into_iter().chain(velocity).cloned().collect();
    if !later {
        return launch_sgd(step, &[tensors]);
    }
    if push(&SGD, Pending { step: *step, tensors }) >= MOST {
        flush();
    }
}

/// A step on the tensors of each, in the order of [`sgd`].
fn launch_sgd(step: &SgdStep, steps: &[Vec<CubeTensor>]) {
    let client = steps[0][0].client.clone();
    let with_momentum = steps[0].len() == 3;
    let jobs = jobs::<3>(steps);
    for batch in batches(&client, &jobs, None, MOST) {
        let (count, dim) = batch.grid(&client);
        // A buffer is bound once: none stand for what there is not.
        let (velocities, velocity_firsts) = match with_momentum {
            true => (batch.buffers(2), batch.firsts(2)),
            false => (SequenceArg::new(), SequenceArg::new()),
        };
        // SAFETY: `batches` has checked that the buffers hold the jobs' elements, of which the kernel
        // touches those of the batch's spans.
        unsafe {
            sgd_kernel::launch_unchecked(
                &client,
                count,
                dim,
                batch.width,
                batch.buffers(0),
                batch.buffers(1),
                velocities,
                batch.firsts(0),
                batch.firsts(1),
                velocity_firsts,
                batch.counts(),
                batch.tiles(),
                step.lr,
                step.penalty,
                step.momentum,
                step.rest,
                0,
                with_momentum,
                step.nesterov,
                batch.tile,
            );
        }
    }
}
