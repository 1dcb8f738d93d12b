//! What a rank stores of a parameter, as tensor data in host memory.

use std::ops::Range;

use burn::tensor::{DType, Shape, TensorData};

use super::decode::decode;
use super::encode::{encode, needs_matrix};
use crate::StorageType;

/// Returns elements `range` of a parameter as `storage` has them, in shape `shape`. `elements` are
/// those of the range, or all of the parameter if [`needs_matrix`].
pub fn stored_data(
    elements: Vec<f32>,
    range: &Range<usize>,
    storage: StorageType,
    shape: impl Into<Shape>,
) -> TensorData {
    if storage.is_coded() {
        return words_data(encode(&elements, range, storage), shape.into());
    }
    debug_assert!(!needs_matrix(storage) && elements.len() == range.len());
    TensorData::new(elements, shape).convert_dtype(storage.dtype())
}

/// Returns words of codes as tensor data: f32 elements with the bits of the words.
pub fn words_data(words: Vec<u32>, shape: Shape) -> TensorData {
    TensorData::new(bytemuck::cast_vec::<u32, f32>(words), shape)
}

/// Returns the first `numel` elements, given the bytes of their codes.
pub fn decoded_elements(bytes: &[u8], storage: StorageType, numel: usize) -> Vec<f32> {
    let words: Vec<u32> = bytemuck::pod_collect_to_vec(bytes);
    let mut elements = decode(&words[..storage.stored_len(numel)], storage);
    elements.truncate(numel);
    elements
}

/// Returns elements of a float dtype in f32, given their bytes; `None` for other dtypes.
pub fn widened_elements(bytes: &[u8], dtype: DType) -> Option<Vec<f32>> {
    Some(match dtype {
        DType::F64 => {
            bytemuck::pod_collect_to_vec::<u8, f64>(bytes).iter().map(|x| *x as f32).collect()
        }
        DType::F32 => bytemuck::pod_collect_to_vec(bytes),
        DType::BF16 => bytemuck::pod_collect_to_vec::<u8, half::bf16>(bytes)
            .iter()
            .map(|x| x.to_f32())
            .collect(),
        DType::F16 => bytemuck::pod_collect_to_vec::<u8, half::f16>(bytes)
            .iter()
            .map(|x| x.to_f32())
            .collect(),
        _ => return None,
    })
}
