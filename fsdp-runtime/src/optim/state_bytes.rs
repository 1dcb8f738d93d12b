//! The size of the state that an optimizer keeps for a parameter.

use burn::tensor::Tensor;

/// Returns the bytes of a tensor of the state: it has the shape and the dtype of the parameter.
pub(super) fn bytes<const D: usize>(param: &Tensor<D>) -> usize {
    param.shape().num_elements() * param.dtype().size()
}
