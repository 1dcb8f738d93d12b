//! Products of matrices.

use burn::tensor::DType;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul};
use burn_cubecl::tensor::CubeTensor;

/// Implements [`Kernels::product`](crate::Kernels::product).
pub(super) fn product([a, b]: [CubeTensor; 2], dtype: DType) -> CubeTensor {
    matmul(a, b, None, MatmulStrategy::default(), dtype)
        .expect("every device has a product of matrices")
}
