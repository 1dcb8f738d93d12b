//! Operations on tensors that tensor parallel ranks share or have parts of.
//!
//! *Shared*: a tensor that all ranks have, used with parts of matrices. The identity in forward; its gradient
//! is the sum over the ranks. *Summed*: the sum over the ranks of what each computed with its part. Its
//! gradient is the same on all ranks. *Gathered*: the parts of all ranks along the last dimension. Its
//! gradient is this rank's part.

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};

use super::record::record;
use crate::backend::{Float, ModelBackend, Tracked};
use crate::error::{Error, raise};

/// The tensor parallel ranks, as the operations see them.
pub(in crate::runtime) trait TensorRanks<B: ModelBackend>:
    Debug + Send + Sync
{
    /// Returns the sum of a tensor over the ranks, in its dtype.
    fn sum(&self, tensor: Float<B>) -> Result<Float<B>, Error>;
    /// Returns the tensors of all ranks, joined along the last dimension.
    fn join(&self, tensor: Float<B>) -> Result<Float<B>, Error>;
    /// Returns this rank's part of a tensor along the last dimension.
    fn part(&self, tensor: Float<B>) -> Float<B>;
}

/// What happens to a tensor between tensor parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::runtime) enum Exchange {
    /// The ranks have the tensor, and use it with parts of matrices.
    Shared,
    /// The ranks add their tensors.
    Summed,
    /// The ranks join their tensors along the last dimension.
    Gathered,
}

impl Exchange {
    /// Returns the result of the exchange.
    pub(in crate::runtime) fn forward<B: ModelBackend>(
        self,
        ranks: &dyn TensorRanks<B>,
        tensor: Float<B>,
    ) -> Result<Float<B>, Error> {
        match self {
            Self::Shared => Ok(tensor),
            Self::Summed => ranks.sum(tensor),
            Self::Gathered => ranks.join(tensor),
        }
    }
}

#[derive(Debug)]
struct ExchangeState<B: ModelBackend> {
    ranks: Arc<dyn TensorRanks<B>>,
    exchange: Exchange,
}

impl<B: ModelBackend> Clone for ExchangeState<B> {
    fn clone(&self) -> Self {
        Self { ranks: self.ranks.clone(), exchange: self.exchange }
    }
}

#[derive(Debug)]
struct ExchangeBackward;

impl<B: ModelBackend> Backward<B, 1> for ExchangeBackward {
    type State = ExchangeState<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [parent] = ops.parents;
        let ExchangeState { ranks, exchange } = ops.state;
        let gradient = grads.consume::<B>(&ops.node);
        let Some(parent) = parent else { return };
        let gradient = match exchange {
            Exchange::Shared => ranks.sum(gradient).unwrap_or_else(|error| raise(error)),
            Exchange::Summed => gradient,
            Exchange::Gathered => ranks.part(gradient),
        };
        grads.register::<B>(parent.id, gradient);
    }
}

/// Exchanges a tensor between tensor parallel ranks, and records it.
pub(in crate::runtime) fn exchange<B: ModelBackend>(
    ranks: Arc<dyn TensorRanks<B>>,
    exchange: Exchange,
    tensor: Tracked<B>,
) -> Result<Tracked<B>, Error> {
    let (value, node) = tensor.into_parts();
    let value = exchange.forward(&*ranks, value)?;
    debug_assert!(value.shape().num_elements() > 0 || exchange != Exchange::Summed);
    Ok(record::<B, _, 1>(ExchangeBackward, [node], ExchangeState { ranks, exchange }, value))
}
