//! The data that a recomputed unit saves from forward to backward.

use std::sync::{Arc, Mutex, MutexGuard};

use burn::backend::TensorMetadata;
use burn::backend::autodiff::NodeId;
use burn::tensor::{Shape, TensorData};

use crate::backend::{Float, ModelBackend, Raw, ShardBackend, numel};
use crate::error::IgnorePoison;
use crate::module::SavedForward;
use crate::param_group::memory::Counted;

/// An input of a recomputed forward.
#[derive(Debug)]
pub(crate) struct SavedInput {
    /// Node of the input in the outer graph, if the input is tracked.
    pub(in crate::runtime) node: Option<NodeId>,
    /// Elements of the input, if they are offloaded to the host.
    pub(crate) host: Option<TensorData>,
}

/// Data that a recomputed call saves from forward to backward.
#[derive(Debug)]
pub(crate) struct SavedCall<B: ModelBackend>(Mutex<Parts<B>>);

#[derive(Debug)]
struct Parts<B: ModelBackend> {
    /// The forward, with the inputs that are saved on the device.
    forward: Option<SavedForward>,
    /// Inputs in the order in which the forward takes them.
    inputs: Vec<SavedInput>,
    outputs: Vec<SavedOutput<B>>,
    counted: Option<[Counted; 2]>,
}

/// Input of a recomputation.
pub(crate) struct RecomputeTask<B: ModelBackend> {
    pub(in crate::runtime) forward: SavedForward,
    pub(in crate::runtime) inputs: Vec<SavedInput>,
    pub(in crate::runtime) outputs: Vec<SavedOutput<B>>,
    /// Memory of the inputs in the accounting, to be kept as long as the inputs.
    pub(in crate::runtime) counted: Option<[Counted; 2]>,
}

/// An output of the first run, and its gradient.
#[derive(Debug)]
pub(crate) struct SavedOutput<B: ModelBackend> {
    pub(in crate::runtime) shape: Shape,
    /// The first [`SAMPLE`] elements of the output, in debug builds.
    sample: Option<Vec<f32>>,
    /// Gradient of the output, once it has arrived.
    pub(crate) gradient: Option<Float<B>>,
}

/// Number of elements of an output that debug builds compare.
const SAMPLE: usize = 64;

fn sample<B: ModelBackend>(value: &Float<B>) -> Option<Vec<f32>> {
    if !cfg!(debug_assertions) {
        return None;
    }
    let len = numel::<B>(value).min(SAMPLE);
    let elements = B::defer(vec![value.clone()], vec![(Shape::from([len]), value.dtype())], {
        move |buffers| {
            let copy = |buffer| Raw::<B>::copy_range(buffer, 0..len, Shape::from([len]));
            buffers.into_iter().map(copy).collect()
        }
    });
    let elements = B::lower(elements).pop().expect("`lower` returns as many buffers");
    Some(Raw::<B>::to_data(elements).iter::<f32>().collect())
}

impl<B: ModelBackend> SavedOutput<B> {
    fn new(value: &Float<B>) -> Self {
        Self { shape: value.shape(), sample: sample::<B>(value), gradient: None }
    }

    /// Returns whether a recomputed output equals that of the first run, to a relative error of
    /// 1/64 in the 2-norm of the sample. Devices may sum in another order, and the first output may
    /// have been rounded to another dtype. Always true in release builds.
    pub(in crate::runtime) fn matches(&self, value: &Float<B>) -> bool {
        let (Some(first), Some(second)) = (&self.sample, sample::<B>(value)) else { return true };
        let square = |x: f32| f64::from(x) * f64::from(x);
        let length: f64 = first.iter().map(|&x| square(x)).sum();
        let apart: f64 = first.iter().zip(&second).map(|(&a, &b)| square(a - b)).sum();
        // Non-finite values are reported elsewhere.
        !length.is_finite() || apart.sqrt() <= length.sqrt() / 64.0
    }
}

impl<B: ModelBackend> SavedCall<B> {
    pub(in crate::runtime) fn new(
        inputs: Vec<SavedInput>,
        forward: SavedForward,
        counted: [Counted; 2],
    ) -> Arc<Self> {
        let (forward, counted) = (Some(forward), Some(counted));
        Arc::new(Self(Mutex::new(Parts { forward, inputs, outputs: Vec::new(), counted })))
    }

    fn lock(&self) -> MutexGuard<'_, Parts<B>> {
        self.0.lock().ignore_poison()
    }

    /// Adds an output of the first run and returns its index.
    pub(in crate::runtime) fn add_output(&self, value: &Float<B>) -> usize {
        let outputs = &mut self.lock().outputs;
        outputs.push(SavedOutput::new(value));
        outputs.len() - 1
    }

    /// Saves the gradient of the output with the index `index`.
    pub(in crate::runtime) fn set_gradient(&self, index: usize, gradient: Float<B>) {
        if let Some(output) = self.lock().outputs.get_mut(index) {
            output.gradient = Some(gradient);
        }
    }

    /// Takes everything out for the recomputation. Returns `None` from the second call on.
    pub(in crate::runtime) fn take(&self) -> Option<RecomputeTask<B>> {
        let mut parts = self.lock();
        Some(RecomputeTask {
            forward: parts.forward.take()?,
            inputs: std::mem::take(&mut parts.inputs),
            outputs: std::mem::take(&mut parts.outputs),
            counted: parts.counted.take(),
        })
    }
}
