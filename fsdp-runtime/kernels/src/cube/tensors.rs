//! Tensors of CubeCL devices as kernels need them.

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::{ElemType, FloatKind};

/// Returns CubeCL's name of a float dtype.
///
/// # Panics
///
/// For dtypes other than f32, bf16 and f16.
pub(super) fn element(dtype: DType) -> ElemType {
    ElemType::Float(match dtype {
        DType::F32 => FloatKind::F32,
        DType::BF16 => FloatKind::BF16,
        DType::F16 => FloatKind::F16,
        other => panic!("kernels take f32, bf16 and f16, not {other:?}"),
    })
}

/// Returns a new tensor with uninitialised elements, on the device of `neighbour`.
pub fn empty(neighbour: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    let client = neighbour.client.clone();
    let handle = client.empty(shape.num_elements().max(1) * dtype.size());
    CubeTensor::new_contiguous(client, neighbour.device.clone(), shape, handle, dtype)
}

/// Returns the tensor if it is contiguous, else a contiguous copy.
pub fn contiguous(tensor: CubeTensor) -> CubeTensor {
    burn_cubecl::kernel::into_contiguous(tensor)
}
