//! Dropout as one operation: what it draws is drawn again in backward, and no mask is kept.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::{Tensor, TensorData};

use super::{KernelError, MaskSource, check_dtype, give, take};
use crate::backend::kernels::Kernels;
use crate::backend::{Float, ShardBackend, Tracked, Value, with_backend};

/// The tensor's elements, each zero with the source's probability and otherwise scaled by the
/// inverse of what is kept, in one pass. The same bits on every device.
///
/// # Errors
///
/// [`KernelError`] for dtypes other than f32, bf16 and f16.
pub fn dropout(tensor: Tensor<1>, source: &MaskSource) -> Result<Tensor<1>, KernelError> {
    with_backend!(tensor.device(), |B, _device| {
        Ok(give::<B>(B::dropout(take::<B>(tensor)?, source)))
    })
}

/// The same of a tensor of any shape, recorded where it is tracked. On other backends and for other
/// dtypes the mask comes from the host.
pub(crate) fn dropout_tracked<const D: usize>(source: &MaskSource, input: Tensor<D>) -> Tensor<D> {
    let (device, dtype) = (input.device(), input.dtype());
    let dropped: Result<Tensor<D>, KernelError> = with_backend!(device, |B, inner| {
        check_dtype::<B>(&inner, dtype).and_then(|()| {
            let value = B::from_dispatch(input.clone().into_dispatch());
            let other = || KernelError::OtherDevice { device: format!("{device:?}") };
            let value = match value.ok_or_else(other)? {
                Value::Plain(value) => Value::Plain(B::dropout(value, source)),
                Value::Autodiff(value, context) => {
                    Value::Autodiff(record::<B>(value, source), context)
                }
            };
            Ok(Tensor::from_dispatch(B::into_dispatch(value)))
        })
    });
    dropped.unwrap_or_else(|_| {
        let mask = source.mask(input.shape().num_elements());
        let mask = TensorData::new(mask, input.shape());
        let mask = Tensor::<D>::from_data(mask, (&device.inner(), dtype));
        let zero = mask.clone().equal_elem(0.0);
        (input * mask).mask_fill(zero, 0.0)
    })
}

fn record<B: ShardBackend>(input: Tracked<B>, source: &MaskSource) -> Tracked<B> {
    let (value, node) = input.into_parts();
    let value = B::dropout(value, source);
    let op = Backward::<B, 1>::prepare::<NoCheckpointing>(Dropout, [node]);
    match op.compute_bound().stateful() {
        OpsKind::Tracked(op) => op.finish(*source, value),
        OpsKind::UnTracked(op) => op.finish(value),
    }
}

#[derive(Debug)]
struct Dropout;

impl<B: ShardBackend> Backward<B, 1> for Dropout {
    type State = MaskSource;

    fn backward(self, ops: Ops<MaskSource, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let drop = |grad: Float<B>| B::dropout(grad, &ops.state);
        unary::<B, _>(ops.parents, ops.node, grads, drop);
    }
}
