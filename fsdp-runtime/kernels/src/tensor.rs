//! Short names for the tensor types of a backend.

use burn::backend::Autodiff;
use burn::tensor::DType;

/// Float tensor of backend `B`, without autodiff.
pub type Float<B> = <B as burn::backend::BackendTypes>::FloatTensorPrimitive;
/// Float tensor of `Autodiff<B>`: a tensor of backend `B` with its autodiff node.
pub type Tracked<B> = <Autodiff<B> as burn::backend::BackendTypes>::FloatTensorPrimitive;

/// Returns the dtype in which sums over elements of `dtype` are computed: f64 for f64, else f32.
pub fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}
