//! Operations on tensors that tensor parallel ranks share or have parts of: [`Exchange`] says which there are.

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};

use super::record::record;
use crate::backend::{Float, ModelBackend, Tracked};
use crate::error::{Error, raise};
use crate::module::Exchange;

/// A dimension along which tensors are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::runtime) enum Axis {
    /// The last dimension.
    Features,
    /// The dimension before the last.
    Sequence,
}

impl Axis {
    /// Returns the index of the dimension, in a tensor of `dims` dimensions.
    pub(in crate::runtime) fn dim(self, dims: usize) -> usize {
        match self {
            Self::Features => dims - 1,
            Self::Sequence => dims - 2,
        }
    }
}

/// The tensor parallel ranks, as the operations see them.
pub(in crate::runtime) trait TensorRanks<B: ModelBackend>:
    Debug + Send + Sync
{
    /// Returns the sum of a tensor over the ranks, in its dtype.
    fn sum(&self, tensor: Float<B>) -> Result<Float<B>, Error>;
    /// Returns this rank's part of the sum of a tensor over the ranks, in its dtype.
    fn sum_part(&self, tensor: Float<B>, axis: Axis) -> Result<Float<B>, Error>;
    /// Returns the tensors of all ranks, joined along a dimension.
    fn join(&self, tensor: Float<B>, axis: Axis) -> Result<Float<B>, Error>;
    /// Returns this rank's part of a tensor.
    fn part(&self, tensor: Float<B>, axis: Axis) -> Float<B>;
}

/// What a pass does with a tensor or its gradient.
#[derive(Clone, Copy, Debug)]
enum Action {
    Keep,
    Sum,
    SumPart,
    Join(Axis),
    Part(Axis),
}

impl Action {
    fn apply<B: ModelBackend>(
        self,
        ranks: &dyn TensorRanks<B>,
        tensor: Float<B>,
    ) -> Result<Float<B>, Error> {
        match self {
            Self::Keep => Ok(tensor),
            Self::Sum => ranks.sum(tensor),
            Self::SumPart => ranks.sum_part(tensor, Axis::Sequence),
            Self::Join(axis) => ranks.join(tensor, axis),
            Self::Part(axis) => Ok(ranks.part(tensor, axis)),
        }
    }
}

impl Exchange {
    /// Returns what forward does with a tensor, and backward with its gradient.
    fn actions(self) -> [Action; 2] {
        use Action::{Join, Keep, Part, Sum, SumPart};
        use Axis::{Features, Sequence};
        match self {
            Self::Shared => [Keep, Sum],
            Self::Summed => [Sum, Keep],
            Self::Gathered => [Join(Features), Part(Features)],
            Self::SequenceShared => [Join(Sequence), SumPart],
            Self::SequenceSummed => [SumPart, Join(Sequence)],
            Self::SequencePart => [Part(Sequence), Join(Sequence)],
            Self::SequenceGathered => [Join(Sequence), Part(Sequence)],
        }
    }

    /// Returns the result of the exchange.
    pub(in crate::runtime) fn forward<B: ModelBackend>(
        self,
        ranks: &dyn TensorRanks<B>,
        tensor: Float<B>,
    ) -> Result<Float<B>, Error> {
        self.actions()[0].apply(ranks, tensor)
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
        let gradient = exchange.actions()[1].apply(&*ranks, gradient);
        grads.register::<B>(parent.id, gradient.unwrap_or_else(|error| raise(error)));
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
