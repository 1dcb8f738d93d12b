//! The input of several layers: their gradients are added up in one buffer.
//!
//! Burn adds the gradients of a tensor that several operations read, each of them in a tensor of its own.
//! Here the layers read a node of their own, whose gradient is the running sum. Its backward comes after
//! that of every layer, and passes the sum on.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex};

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::{Shape, Tensor};
use fsdp_kernels::{Float, IgnorePoison, Tracked};

use super::matrices::{Factors, in_shape, sum_of_products};
use crate::backend::model_backend::{FloatTensor, ModelBackend, with_backend};
use crate::error::ShardError;

/// The running sum of the gradients of an input, as a matrix of rows.
pub(super) struct GradientSum<B: ModelBackend>(Arc<Mutex<Option<Float<B>>>>);

impl<B: ModelBackend> Clone for GradientSum<B> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<B: ModelBackend> fmt::Debug for GradientSum<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GradientSum")
    }
}

impl<B: ModelBackend> GradientSum<B> {
    /// Adds products of matrices to the sum. Returns no gradient: the input's node has the sum.
    pub(super) fn add(self, factors: Vec<Factors<B>>) -> Option<Float<B>> {
        let mut sum = self.0.lock().ignore_poison();
        let before = sum.take();
        *sum = Some(sum_of_products::<B>(before, factors));
        None
    }
}

/// The sum of the gradients that several layers give their common input.
pub(crate) struct SharedInput {
    /// A [`GradientSum`] of the input's backend.
    sum: Box<dyn Any>,
}

impl SharedInput {
    /// Returns the input as the layers should read it, and the sum of its gradients. Returns `None` for
    /// an input that is not tracked, and for devices without kernels.
    pub(crate) fn new<const D: usize>(input: &Tensor<D>) -> Option<(Tensor<D>, Self)> {
        let shared: Result<_, ShardError> = with_backend!(input.device(), |B, _inner| {
            Ok(match B::from_dispatch(input.clone().into_dispatch()) {
                Some(FloatTensor::Autodiff(tensor, context)) if tensor.is_tracked() => {
                    let sum = GradientSum::<B>(Arc::default());
                    let value = FloatTensor::Autodiff(record::<B>(tensor, sum.clone()), context);
                    let sum: Box<dyn Any> = Box::new(sum);
                    Some((Tensor::from_dispatch(B::into_dispatch(value)), Self { sum }))
                }
                _ => None,
            })
        });
        shared.ok().flatten()
    }

    /// Returns the sum, for layers of the same backend.
    pub(super) fn sum<B: ModelBackend>(&self) -> Option<GradientSum<B>> {
        self.sum.downcast_ref::<GradientSum<B>>().cloned()
    }
}

/// Records the identity on the input of several layers.
fn record<B: ModelBackend>(input: Tracked<B>, sum: GradientSum<B>) -> Tracked<B> {
    let (value, node) = input.into_parts();
    let shape = value.shape();
    let op = Backward::<B, 1>::prepare::<NoCheckpointing>(Shared, [node]);
    match op.compute_bound().stateful() {
        OpsKind::Tracked(op) => op.finish(State { sum, shape }, value),
        OpsKind::UnTracked(op) => op.finish(value),
    }
}

#[derive(Clone, Debug)]
struct State<B: ModelBackend> {
    sum: GradientSum<B>,
    /// Shape of the input.
    shape: Shape,
}

/// Backward of the common input: it passes the sum on.
#[derive(Debug)]
struct Shared;

impl<B: ModelBackend> Backward<B, 1> for Shared {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let State { sum, shape } = ops.state;
        let sum = sum.0.lock().ignore_poison().take();
        if let ([Some(parent)], Some(sum)) = (&ops.parents, sum) {
            grads.register::<B>(parent.id, in_shape::<B>(sum, shape));
        }
    }
}
