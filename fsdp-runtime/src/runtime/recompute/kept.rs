//! What a recomputed unit keeps from forward to backward.

use std::sync::{Arc, Mutex, MutexGuard};

use burn::backend::TensorMetadata;
use burn::backend::autodiff::NodeId;
use burn::tensor::{Shape, TensorData};

use crate::backend::{Float, ShardBackend, numel, to_data};
use crate::module::KeptForward;
use crate::param_group::memory::Counted;

/// An input of a checkpointed forward, as backward needs it.
#[derive(Debug)]
pub(crate) struct KeptInput {
    /// Its node in the outer graph, where it has one.
    pub(crate) node: Option<NodeId>,
    /// Its elements, where they rest on the host.
    pub(crate) host: Option<TensorData>,
}

/// What a checkpointed call keeps from forward to backward.
#[derive(Debug)]
pub(crate) struct KeptCall<B: ShardBackend>(Mutex<Parts<B>>);

#[derive(Debug)]
pub(super) struct Parts<B: ShardBackend> {
    /// Holds the inputs that are kept where they lie.
    forward: Option<KeptForward>,
    /// In the order in which the forward is given them.
    inputs: Vec<KeptInput>,
    pub(super) outputs: Vec<Arrived<B>>,
    counted: Option<[Counted; 2]>,
}

/// What a recomputation begins with.
pub(crate) struct Taken<B: ShardBackend> {
    pub(crate) forward: KeptForward,
    pub(crate) inputs: Vec<KeptInput>,
    pub(crate) outputs: Vec<Arrived<B>>,
    /// Placement as long as the inputs.
    pub(crate) counted: Option<[Counted; 2]>,
}

/// An output, as it left the first time, and what came back.
#[derive(Debug)]
pub(crate) struct Arrived<B: ShardBackend> {
    pub(crate) shape: Shape,
    /// In debug builds, some of its elements.
    sample: Option<Vec<f32>>,
    /// Its gradient, once that has arrived.
    pub(crate) gradient: Option<Float<B>>,
}

/// Elements of a sample.
const SAMPLE: usize = 64;

fn sample<B: ShardBackend>(value: &Float<B>) -> Option<Vec<f32>> {
    if !cfg!(debug_assertions) {
        return None;
    }
    let len = numel::<B>(value).min(SAMPLE);
    let elements = B::copy_range(value.clone(), 0..len, Shape::from([len]));
    Some(to_data::<B>(elements).iter::<f32>().collect())
}

impl<B: ShardBackend> Arrived<B> {
    pub(super) fn new(value: &Float<B>) -> Self {
        Self { shape: value.shape(), sample: sample::<B>(value), gradient: None }
    }

    /// Whether a second run computed the same, to 1/64: devices may add in another order, and the
    /// output may have been rounded to another type when it left.
    pub(crate) fn is_again(&self, value: &Float<B>) -> bool {
        let (Some(first), Some(second)) = (&self.sample, sample::<B>(value)) else { return true };
        let square = |x: f32| f64::from(x) * f64::from(x);
        let length: f64 = first.iter().map(|&x| square(x)).sum();
        let apart: f64 = first.iter().zip(&second).map(|(&a, &b)| square(a - b)).sum();
        // What is infinite or not a number was so for reasons that are told elsewhere.
        !length.is_finite() || apart.sqrt() <= length.sqrt() / 64.0
    }
}

impl<B: ShardBackend> KeptCall<B> {
    pub(crate) fn new(
        inputs: Vec<KeptInput>,
        forward: KeptForward,
        counted: [Counted; 2],
    ) -> Arc<Self> {
        let (forward, counted) = (Some(forward), Some(counted));
        Arc::new(Self(Mutex::new(Parts { forward, inputs, outputs: Vec::new(), counted })))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Parts<B>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The forward, once, its inputs, and what has arrived for each of its outputs.
    pub(crate) fn take(&self) -> Option<Taken<B>> {
        let mut parts = self.lock();
        Some(Taken {
            forward: parts.forward.take()?,
            inputs: std::mem::take(&mut parts.inputs),
            outputs: std::mem::take(&mut parts.outputs),
            counted: parts.counted.take(),
        })
    }
}
