//! *PreBackward*: the identity on a unit's output.
//!
//! The backward runs before that of any operation of the unit, and gathers the unit.
//!
//! The parents are the output and the unit's inputs. Once the pass has reached the depth of the
//! inputs, all operations of the unit have run, even if some gradients never arrive.

use burn::backend::TensorMetadata;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::tensor::{DType, Shape};

use super::hooks::{Depth, OpState, zero};
use super::record::{MAX_ORDERING_INPUTS, record_after};
use crate::backend::{Float, ModelBackend, Tracked};
use crate::error::raise;

#[derive(Debug)]
struct PreBackward;

#[derive(Debug)]
struct OutputState<B: ModelBackend> {
    state: OpState<B>,
    /// Shapes and dtypes of the unit's inputs.
    ordering_inputs: Vec<(Shape, DType)>,
}

impl<B: ModelBackend> Clone for OutputState<B> {
    fn clone(&self) -> Self {
        Self { state: self.state.clone(), ordering_inputs: self.ordering_inputs.clone() }
    }
}

impl<B: ModelBackend, const N: usize> Backward<B, N> for PreBackward {
    type State = OutputState<B>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let OutputState { state, ordering_inputs } = ops.state;
        let least = ops.parents[1..].iter().flatten().map(|parent| parent.order).min();
        // With the maximum number of parents there may be more inputs, whose depth is unknown.
        let least = least.filter(|_| N <= MAX_ORDERING_INPUTS).unwrap_or(0);
        let depth = Depth { reached: ops.node.order, inputs: least };
        let inputs = ops.parents[1..].iter().map(|parent| parent.as_ref().map(|node| node.id));
        let inputs = inputs.collect();
        let gradient = grads.consume::<B>(&ops.node);
        match state.hooks.pre_backward(state.call, depth) {
            Ok(true) => register_zeros::<B>(grads, inputs, ordering_inputs, &gradient.device()),
            Ok(false) => {}
            Err(error) => raise(error),
        }
        if let Some(parent) = &ops.parents[0] {
            grads.register::<B>(parent.id, gradient);
        }
    }
}

/// Registers zeros as gradients of the unit's inputs. Burn expects a gradient at every parent; an
/// input that the unit does not use gets none from the unit's own operations.
fn register_zeros<B: ModelBackend>(
    grads: &mut Gradients,
    inputs: Vec<Option<NodeId>>,
    ordering_inputs: Vec<(Shape, DType)>,
    device: &B::Device,
) {
    for (input, (shape, dtype)) in inputs.into_iter().zip(ordering_inputs) {
        let Some(input) = input else { continue };
        grads.register::<B>(input, zero::<B>(shape, device, dtype));
    }
}

/// Records a unit's output, whose gradient first gathers the unit. `ordering_inputs` are the unit's
/// inputs; `detach` copies a value that is a view of one of the unit's gather buffers.
pub(in crate::runtime) fn pre_backward<B: ModelBackend>(
    state: OpState<B>,
    output: Tracked<B>,
    ordering_inputs: &[Tracked<B>],
    detach: impl FnOnce(Float<B>) -> Float<B>,
) -> Tracked<B> {
    let (value, output) = output.into_parts();
    let value = detach(value);
    let shapes = ordering_inputs.iter().map(|input| (input.shape(), input.dtype())).collect();
    let state = OutputState { state, ordering_inputs: shapes };
    record_after(PreBackward, output, ordering_inputs, state, value)
}
