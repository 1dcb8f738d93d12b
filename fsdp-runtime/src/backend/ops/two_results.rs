//! Autodiff operations with two results.
//!
//! Burn's operations have one result each. Here an operation, the *joint*, has the parents of both results,
//! and each result is a child of the joint. In backward a child leaves its gradient in a place that it
//! shares with the joint. Burn runs backward by depth, the deepest first, so the joint's backward runs after
//! those of both children. It computes with both gradients at once, where the gradients of two
//! operations would be added in a pass of their own.

use std::fmt;
use std::sync::{Arc, Mutex};

use burn::backend::Backend;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use fsdp_kernels::{Float, Tracked};

use crate::backend::model_backend::ModelBackend;
use crate::error::IgnorePoison;

/// Operation with two results.
pub(super) trait ResultGrads<B: Backend>: fmt::Debug + Send + 'static {
    /// What the operation saves for backward.
    type State: Clone + fmt::Debug + Send + 'static;

    /// Returns the gradients of the parents, in order, given those of the results. A result that was not
    /// used has none. Each tracked parent needs a gradient.
    fn gradients(state: Self::State, grads: [Option<Float<B>>; 2]) -> Vec<Option<Float<B>>>;
}

/// Records the results of an operation on the parents.
pub(super) fn two_results<B: ModelBackend, R: ResultGrads<B>, const N: usize>(
    op: R,
    parents: [NodeGuard; N],
    state: R::State,
    results: [Float<B>; 2],
) -> [Tracked<B>; 2] {
    let grads = Grads::<B>::default();
    let op = Backward::<B, N>::prepare::<NoCheckpointing>(Joint(op), parents);
    // The joint has no value of its own.
    let value = results[0].clone();
    let joint = match op.compute_bound().stateful() {
        OpsKind::Tracked(op) => op.finish((state, grads.clone()), value),
        OpsKind::UnTracked(op) => op.finish(value),
    };
    let mut index = 0;
    results.map(|value| {
        let state = (grads.clone(), index);
        index += 1;
        let op = Backward::<B, 1>::prepare::<NoCheckpointing>(OneResult, [joint.node()]);
        match op.compute_bound().stateful() {
            OpsKind::Tracked(op) => op.finish(state, value),
            OpsKind::UnTracked(op) => op.finish(value),
        }
    })
}

/// Gradients of the results, until the joint takes them.
struct Grads<B: Backend>(Arc<Mutex<[Option<Float<B>>; 2]>>);

impl<B: Backend> Default for Grads<B> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new([None, None])))
    }
}

impl<B: Backend> Clone for Grads<B> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<B: Backend> fmt::Debug for Grads<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grads")
    }
}

/// Backward of both results.
#[derive(Debug)]
struct Joint<R>(R);

impl<B: ModelBackend, R: ResultGrads<B>, const N: usize> Backward<B, N> for Joint<R> {
    type State = (R::State, Grads<B>);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (state, of_results) = ops.state;
        let of_results = std::mem::take(&mut *of_results.0.lock().ignore_poison());
        for (parent, gradient) in ops.parents.into_iter().zip(R::gradients(state, of_results)) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}

/// Backward of one result, which leaves its gradient for the joint.
#[derive(Debug)]
struct OneResult;

impl<B: ModelBackend> Backward<B, 1> for OneResult {
    /// Where the gradient is left, and the number of the result.
    type State = (Grads<B>, usize);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (of_results, index) = ops.state;
        let grad = grads.consume::<B>(&ops.node);
        of_results.0.lock().ignore_poison()[index] = Some(grad);
    }
}
