//! The tensor types of a backend.

use burn::backend::Autodiff;

/// A float tensor of backend `B`.
pub(crate) type Float<B> = <B as burn::backend::BackendTypes>::FloatTensorPrimitive;
/// A float tensor of backend `B` with its autodiff node.
pub(crate) type Tracked<B> = <Autodiff<B> as burn::backend::BackendTypes>::FloatTensorPrimitive;
