//! What the autodiff operations ask of the schedule.

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::tensor::{DType, Shape};

use crate::backend::{Float, ShardBackend};
use crate::error::Error;
use crate::module::CallId;
use crate::runtime::recompute::KeptCall;

/// What the ops ask of the schedule, during backward.
pub(crate) trait BackwardHooks<B: ShardBackend>: Debug + Send + Sync {
    /// The gradient of a unit's output arrived: none of the unit's ops has run backward yet. Returns
    /// whether it is the call's first one.
    fn pre_backward(&self, call: CallId, depth: Depth) -> Result<bool, Error>;
    /// A parameter's full gradient arrived.
    fn arrived(&self, call: CallId, entry: usize, gradient: Float<B>) -> Result<(), Error>;
    /// The gradients of a checkpointed unit's outputs arrived, those that do, and every op above the
    /// depth `reached` has run. Runs the unit's forward again and then its backward; returns what to
    /// register for its inputs.
    fn recompute(
        &self,
        state: &State<B>,
        reached: usize,
        kept: &KeptCall<B>,
    ) -> Result<Vec<(NodeId, Float<B>)>, Error>;
}

/// Where in a backward pass a unit's ops run: Burn runs ops by depth, the deepest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Depth {
    /// The depth that the pass has reached: every op below it has run.
    pub(crate) reached: usize,
    /// All ops of the unit that are to run lie below this depth.
    pub(crate) inputs: usize,
}

/// A shared [`BackwardHooks`], and the call the op belongs to.
pub(crate) struct State<B: ShardBackend> {
    pub(crate) hooks: Arc<dyn BackwardHooks<B>>,
    pub(crate) call: CallId,
    /// Alive as long as some op of the call is: what tells a forward that no backward will follow.
    pub(crate) alive: Arc<()>,
}

impl<B: ShardBackend> Clone for State<B> {
    fn clone(&self) -> Self {
        Self { hooks: self.hooks.clone(), call: self.call, alive: self.alive.clone() }
    }
}

impl<B: ShardBackend> Debug for State<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "State({:?})", self.call)
    }
}

/// Zeros of `shape`, in the memory of one.
pub(crate) fn zero<B: ShardBackend>(shape: Shape, device: &B::Device, dtype: DType) -> Float<B> {
    let zero = Shape::from(vec![1; shape.num_dims()]);
    B::float_expand(B::float_zeros(zero, device, dtype.into()), shape)
}
