//! The interface through which the autodiff operations reach the schedule.

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::tensor::{DType, Shape};

use super::super::recompute::SavedCall;
use crate::backend::{Float, ModelBackend};
use crate::error::Error;
use crate::module::CallId;

/// The schedule, as the autodiff operations see it during backward.
pub(in crate::runtime) trait BackwardHooks<B: ModelBackend>:
    Debug + Send + Sync
{
    /// Gathers a unit for its backward. Called when the gradient of an output has arrived and none
    /// of the unit's operations has run backward yet. Returns whether this is the first output of
    /// the call.
    fn pre_backward(&self, call: CallId, depth: Depth) -> Result<bool, Error>;
    /// Adds the full gradient of the parameter `entry` to those of the call.
    fn add_gradient(&self, call: CallId, entry: usize, gradient: Float<B>) -> Result<(), Error>;
    /// Recomputes a unit's forward and runs its backward. Returns the gradients of the unit's
    /// inputs, by the node of each input.
    ///
    /// All output gradients that will arrive have arrived, and every operation deeper than
    /// `reached` has run.
    fn recompute(
        &self,
        state: &OpState<B>,
        reached: usize,
        saved: &SavedCall<B>,
    ) -> Result<Vec<(NodeId, Float<B>)>, Error>;
}

/// The position of a unit's operations in a backward pass, which runs the deepest operations first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::runtime) struct Depth {
    /// Depth that the pass has reached: every deeper operation has run.
    pub(in crate::runtime) reached: usize,
    /// Depth of the unit's inputs: every operation of the unit that will run is deeper.
    pub(in crate::runtime) inputs: usize,
}

/// The schedule, and the call that an operation belongs to.
pub(in crate::runtime) struct OpState<B: ModelBackend> {
    pub(in crate::runtime) hooks: Arc<dyn BackwardHooks<B>>,
    pub(in crate::runtime) call: CallId,
    /// Shared by all operations of the call. Once it is dropped, the graph of the call is gone and
    /// no backward will follow.
    pub(in crate::runtime) alive: Arc<()>,
}

impl<B: ModelBackend> Clone for OpState<B> {
    fn clone(&self) -> Self {
        Self { hooks: self.hooks.clone(), call: self.call, alive: self.alive.clone() }
    }
}

impl<B: ModelBackend> Debug for OpState<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "OpState({:?})", self.call)
    }
}

/// Returns zeros of the given shape, as a view of a single element.
pub(in crate::runtime) fn zero<B: ModelBackend>(
    shape: Shape,
    device: &B::Device,
    dtype: DType,
) -> Float<B> {
    let zero = Shape::from(vec![1; shape.num_dims()]);
    B::float_expand(B::float_zeros(zero, device, dtype.into()), shape)
}
