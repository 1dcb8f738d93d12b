//! Tensors of CubeCL devices as kernels need them.

use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
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

/// Returns whether the heads of a row of a tensor `[batch, heads, rows, width]` lie beside each other.
pub(super) fn is_interleaved(tensor: &CubeTensor) -> bool {
    let strides = tensor.meta.strides();
    tensor.shape()[1] > 1 && strides[1] < strides[2]
}

/// Returns a new tensor `[batch, heads, rows, width]` with uninitialised elements, on the device of `neighbour`,
/// whose heads lie as those of `neighbour` do: beside each other in a row, as in `[batch, rows, heads, width]`, or
/// one after the other.
pub(super) fn empty_heads(neighbour: &CubeTensor, shape: [usize; 4], dtype: DType) -> CubeTensor {
    let [batch, heads, rows, width] = shape;
    match is_interleaved(neighbour) {
        true => {
            let rows = empty(neighbour, Shape::from([batch, rows, heads, width]), dtype);
            CubeBackend::float_swap_dims(rows, 1, 2)
        }
        false => empty(neighbour, Shape::from(shape), dtype),
    }
}

/// Returns the tensor if it is contiguous, else a contiguous copy.
pub fn contiguous(tensor: CubeTensor) -> CubeTensor {
    burn_cubecl::kernel::into_contiguous(tensor)
}
