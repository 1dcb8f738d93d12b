//! The rows of a table as one operation, whose gradient is written once.

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::{FloatDType, Int, IntDType, Shape, Tensor};
use fsdp_kernels::{Float, Kernels, Tracked};

use super::arguments::{apply, has_row_kernels};
use super::error::KernelError;
use super::saved::Saved;
use crate::backend::model_backend::{ModelBackend, with_backend};

/// Most rows of a table, and most ids, whose numbers are exact in f32.
const MOST: usize = 1 << 24;

/// Returns the row of each id, `[rows, length, width]`, and records the operation if the table is tracked.
///
/// Returns `None` for devices without kernels, for tables on Flex but those of f32, for more than 2^24 rows or
/// ids, and for tensors without elements.
pub(crate) fn embedding_tracked(table: &Tensor<2>, ids: &Tensor<2, Int>) -> Option<Tensor<3>> {
    let ([rows, width], [count, length]) = (table.dims(), ids.dims());
    let takes = has_row_kernels(table) && rows.max(count * length) <= MOST;
    if !takes || count * length == 0 {
        return None;
    }
    let output: Result<Tensor<2>, KernelError> = with_backend!(table.device(), |B, inner| {
        let other = || KernelError::OtherDevice { device: format!("{:?}", table.device()) };
        let ids = ids.clone().reshape([count * length]).cast(FloatDType::F32);
        let ids = <B as ModelBackend>::from_dispatch(ids.into_dispatch());
        ids.ok_or_else(other).and_then(|ids| {
            let ids = ids.into_inner();
            let tracked = |table| record::<B>(table, ids.clone());
            apply::<B, 2>(table, &inner, |table| forward::<B>(table, ids.clone()), tracked)
        })
    });
    output.ok().map(|output| output.reshape([count, length, width]))
}

/// Returns the rows of the ids, `[ids, width]`.
fn forward<B: ModelBackend>(table: Float<B>, ids: Float<B>) -> Float<B> {
    B::float_select(table, 0, B::float_into_int(ids, IntDType::I32))
}

/// Looks up the rows, and records it as one autodiff operation.
fn record<B: ModelBackend>(table: Tracked<B>, ids: Float<B>) -> Tracked<B> {
    let (value, node) = table.into_parts();
    let shape = value.shape();
    let output = forward::<B>(value, ids.clone());
    let op = Backward::<B, 1>::prepare::<NoCheckpointing>(Embedding, [node]);
    match op.compute_bound().stateful() {
        OpsKind::Tracked(op) => {
            let saved = Saved::tensors::<B>([&ids]);
            op.finish(State { ids, shape, saved }, output)
        }
        OpsKind::UnTracked(op) => op.finish(output),
    }
}

/// What the gradient of a table depends on.
#[derive(Clone, Debug)]
struct State<B: ModelBackend> {
    ids: Float<B>,
    /// Shape of the table.
    shape: Shape,
    saved: Saved,
}

/// Backward of the rows of a table.
#[derive(Debug)]
struct Embedding;

impl<B: ModelBackend> Backward<B, 1> for Embedding {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let State { ids, shape, saved: _saved } = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            let output = (shape.clone(), grad.dtype());
            let mut gradients = B::defer(vec![grad, ids], vec![output], move |buffers| {
                let [grad, ids] = <[_; 2]>::try_from(buffers).expect("two buffers");
                vec![B::Raw::table_gradient(grad, ids, shape)]
            });
            gradients.pop().expect("`defer` returns one tensor for each output")
        });
    }
}
