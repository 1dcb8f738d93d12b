//! Steps of Adam, AdamW and SGD, in place, reading and writing each element once. Deferred steps
//! share launches.
//!
//! The operations, their order and their roundings are those of the loops on Flex. So both give the
//! same bits on a device whose division and square root round correctly.

use std::sync::Mutex;

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::buffer_slice::BufferSlice;
use super::launch::{Job, launches};
use super::rounding::rounded;
use super::tile::{Tile, begin, end, own_tile};
use crate::batched_steps::DeferredSteps;
use crate::contract::AdamTensors;
use crate::ignore_poison::IgnorePoison;
use crate::update_rules::{AdamStep, SgdStep};

/// Largest number of parameters that share a launch. The compiled kernel contains its body once for
/// each.
const MAX_PARAMS: usize = 8;

/// A deferred step of one parameter. Steps can share a launch if `step`, the number of tensors and
/// the device are equal.
struct Deferred<S> {
    step: S,
    /// Parameter, gradient and state, in the order of the kernel's arguments.
    tensors: Vec<CubeTensor>,
}

/// Optimizer steps that wait to share a launch. They run on the stream of the thread that launches
/// them.
#[derive(Default)]
pub(super) struct CubeSteps {
    adam: Mutex<Vec<Deferred<AdamStep>>>,
    sgd: Mutex<Vec<Deferred<SgdStep>>>,
}

/// Removes the first deferred step and those that can share its launch. Returns their tensors.
fn take_alike<S: PartialEq + Copy>(
    deferred: &mut Vec<Deferred<S>>,
) -> Option<(S, Vec<Vec<CubeTensor>>)> {
    if deferred.is_empty() {
        return None;
    }
    let Deferred { step, tensors } = deferred.remove(0);
    let (count, device) = (tensors.len(), tensors[0].device.clone());
    let like = |other: &mut Deferred<S>| {
        other.step == step && other.tensors.len() == count && other.tensors[0].device == device
    };
    let others = deferred.extract_if(.., like).map(|other| other.tensors);
    Some((step, std::iter::once(tensors).chain(others).collect()))
}

impl DeferredSteps for CubeSteps {
    fn launch(&self) {
        let mut adam = std::mem::take(&mut *self.adam.lock().ignore_poison());
        while let Some((step, tensors)) = take_alike(&mut adam) {
            launch_adam(&step, &tensors);
        }
        let mut sgd = std::mem::take(&mut *self.sgd.lock().ignore_poison());
        while let Some((step, tensors)) = take_alike(&mut sgd) {
            launch_sgd(&step, &tensors);
        }
    }
}

/// Coefficients of [`AdamStep`] as a kernel argument.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Adam {
    beta_1: f32,
    one_minus_beta_1: f32,
    beta_2: f32,
    one_minus_beta_2: f32,
    epsilon: f32,
    root_scale: f32,
    step_size: f32,
    penalty: f32,
    keep: f32,
    rate: f32,
}

/// Runs one step of Adam or AdamW on several parameters. Arguments `.._firsts` hold the index
/// of each tensor's first vector in its buffer.
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
                    + rounded(g * Vector::new(step.one_minus_beta_1), zero);
                let square = rounded(g * g, zero);
                let v = rounded(v * Vector::new(step.beta_2), zero)
                    + rounded(square * Vector::new(step.one_minus_beta_2), zero);
                moments_1.index_mut(part)[moment_1_firsts[part] + index] = m;
                moments_2.index_mut(part)[moment_2_firsts[part] + index] = v;

                let mut largest = v;
                if comptime!(amsgrad) {
                    let before = maxes[part][max_firsts[part] + index];
                    // A NaN in `v` is kept, as the comparison is false.
                    largest = select_many(before.greater_equal(&v), before, v);
                    maxes.index_mut(part)[max_firsts[part] + index] = largest;
                }
                let mut decayed = rounded(p * Vector::new(step.keep), zero);
                if comptime!(cautious) {
                    let nothing = Vector::new(0.0f32);
                    let one = Vector::<u32, N>::new(1u32);
                    let none = Vector::<u32, N>::new(0u32);
                    let p_sign = select_many(p.greater_equal(&nothing), one, none);
                    let m_sign = select_many(m.greater_equal(&nothing), one, none);
                    let smaller = p - rounded(p * Vector::new(step.rate), zero);
                    decayed = select_many(p_sign.equal(&m_sign), smaller, p);
                }
                let root = rounded(Vector::sqrt(largest) * Vector::new(step.root_scale), zero);
                let update = rounded(Vector::new(step.step_size) * m, zero)
                    / (root + Vector::new(step.epsilon));
                params.index_mut(part)[param_firsts[part] + index] = decayed - update;
                index += comptime!(tile.lanes);
            }
        }
        // A tile of this part is done: its index wraps below 0 and exceeds the counts of all later
        // parts.
        at -= tiles[part];
    }
}

/// Returns a job for each parameter, from its tensors.
///
/// # Panics
///
/// If a tensor is not f32 or has another number of elements than the parameter.
fn jobs(steps: &[Vec<CubeTensor>]) -> Vec<Job> {
    let job = |tensors: &Vec<CubeTensor>| {
        let numel = tensors[0].shape().num_elements();
        for tensor in tensors {
            let found = (tensor.dtype, tensor.shape().num_elements());
            let expected = (DType::F32, numel);
            assert_eq!(found, expected, "the tensors of a step are f32 and of one length");
        }
        Job { slices: tensors.iter().map(BufferSlice::of).collect(), numel }
    };
    steps.iter().map(job).collect()
}

/// Runs one step of Adam or AdamW on contiguous tensors of equal length, in their own memory. If
/// there is a batch, the step may run as late as the next [`CubeSteps::launch`](DeferredSteps::launch).
pub(super) fn adam(
    step: &AdamStep,
    grad: CubeTensor,
    tensors: &AdamTensors<CubeTensor>,
    batch: Option<&CubeSteps>,
) {
    let AdamTensors { param, moment_1, moment_2, max } = tensors;
    let tensors = [param, &grad, moment_1, moment_2].into_iter().chain(max).cloned().collect();
    let Some(batch) = batch else { return launch_adam(step, &[tensors]) };
    if defer(&batch.adam, Deferred { step: *step, tensors }) >= MAX_PARAMS {
        batch.launch();
    }
}

/// Defers a step and returns the number of deferred steps.
fn defer<S>(steps: &Mutex<Vec<Deferred<S>>>, step: Deferred<S>) -> usize {
    let mut steps = steps.lock().ignore_poison();
    steps.push(step);
    steps.len()
}

/// Launches one step for several parameters. The tensors of each are the parameter, the gradient,
/// both moments and, under AMSGrad, the largest second moments.
fn launch_adam(step: &AdamStep, steps: &[Vec<CubeTensor>]) {
    let client = steps[0][0].client.clone();
    let amsgrad = steps[0].len() == 5;
    let jobs = jobs(steps);
    for launch in launches(&client, &jobs, None, MAX_PARAMS) {
        let (count, dim) = launch.grid(&client);
        let step_args = AdamLaunch::new(
            step.beta_1,
            step.one_minus_beta_1,
            step.beta_2,
            step.one_minus_beta_2,
            step.epsilon,
            step.root_scale,
            step.step_size,
            step.penalty,
            step.keep,
            step.rate,
        );
        // A writable buffer may be bound only once, so an unused argument is an empty sequence.
        let (maxes, max_firsts) = match amsgrad {
            true => (launch.buffers(4), launch.firsts(4)),
            false => (SequenceArg::new(), SequenceArg::new()),
        };
        // SAFETY: `launches` checked that the buffers hold the jobs' elements; the kernel accesses
        // only those of the launch's spans.
        unsafe {
            adam_kernel::launch_unchecked(
                &client,
                count,
                dim,
                launch.width,
                launch.buffers(0),
                launch.buffers(1),
                launch.buffers(2),
                launch.buffers(3),
                maxes,
                launch.firsts(0),
                launch.firsts(1),
                launch.firsts(2),
                launch.firsts(3),
                max_firsts,
                launch.counts(),
                launch.tiles(),
                step_args,
                0,
                amsgrad,
                step.cautious,
                launch.tile,
            );
        }
    }
}

/// Runs one step of SGD on several parameters. Arguments `.._firsts` hold the index
/// of each tensor's first vector in its buffer.
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
    grad_factor: f32,
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
                let mut update = g;
                if comptime!(with_momentum) {
                    let b = velocities[part][velocity_firsts[part] + index];
                    let b = rounded(b * Vector::new(momentum), zero)
                        + rounded(g * Vector::new(grad_factor), zero);
                    velocities.index_mut(part)[velocity_firsts[part] + index] = b;
                    if comptime!(nesterov) {
                        update = g + rounded(b * Vector::new(momentum), zero);
                    } else {
                        update = b;
                    }
                }
                params.index_mut(part)[param_firsts[part] + index] =
                    p - rounded(update * Vector::new(lr), zero);
                index += comptime!(tile.lanes);
            }
        }
        at -= tiles[part];
    }
}

/// Runs one step of SGD on contiguous tensors of equal length, in the memory of `param` and
/// `velocity`. `batch` has the meaning that it has for [`adam`].
pub(super) fn sgd(
    step: &SgdStep,
    param: &CubeTensor,
    grad: CubeTensor,
    velocity: Option<&CubeTensor>,
    batch: Option<&CubeSteps>,
) {
    let tensors = [param, &grad].into_iter().chain(velocity).cloned().collect();
    let Some(batch) = batch else { return launch_sgd(step, &[tensors]) };
    if defer(&batch.sgd, Deferred { step: *step, tensors }) >= MAX_PARAMS {
        batch.launch();
    }
}

/// Launches one step for several parameters. The tensors of each are the parameter, the gradient
/// and, with momentum, the velocity.
fn launch_sgd(step: &SgdStep, steps: &[Vec<CubeTensor>]) {
    let client = steps[0][0].client.clone();
    let with_momentum = steps[0].len() == 3;
    let jobs = jobs(steps);
    for launch in launches(&client, &jobs, None, MAX_PARAMS) {
        let (count, dim) = launch.grid(&client);
        // A writable buffer may be bound only once, so an unused argument is an empty sequence.
        let (velocities, velocity_firsts) = match with_momentum {
            true => (launch.buffers(2), launch.firsts(2)),
            false => (SequenceArg::new(), SequenceArg::new()),
        };
        // SAFETY: `launches` checked that the buffers hold the jobs' elements; the kernel accesses
        // only those of the launch's spans.
        unsafe {
            sgd_kernel::launch_unchecked(
                &client,
                count,
                dim,
                launch.width,
                launch.buffers(0),
                launch.buffers(1),
                velocities,
                launch.firsts(0),
                launch.firsts(1),
                velocity_firsts,
                launch.counts(),
                launch.tiles(),
                step.lr,
                step.penalty,
                step.momentum,
                step.grad_factor,
                0,
                with_momentum,
                step.nesterov,
                launch.tile,
            );
        }
    }
}
