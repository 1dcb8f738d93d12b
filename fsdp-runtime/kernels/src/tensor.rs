//! Short names for the tensor types of a backend.

use burn::backend::Autodiff;

/// Float tensor of backend `B`, without autodiff.
pub type Float<B> = <B as burn::backend::BackendTypes>::FloatTensorPrimitive;
/// Float tensor of `Autodiff<B>`: a tensor of backend `B` with its autodiff node.
pub type Tracked<B> = <Autodiff<B> as burn::backend::BackendTypes>::FloatTensorPrimitive;
