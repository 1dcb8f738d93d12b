//! Codes of elements in 8 and 4 bits, and their elements.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, FloatDType, Shape, Tensor};
use fsdp_kernels::Kernels;

use super::arguments::{check_dtype, check_range, give_one, take};
use super::error::KernelError;
use crate::backend::model_backend::{ModelBackend, Raw, with_backend};
use crate::backend::shard_backend::encoded;
use crate::layout::StorageType;

/// Returns the codes of a tensor's elements, with the scales of their blocks, as frozen parameters are
/// stored.
///
/// The result has the 32-bit words of the codes, as the bits of f32 elements: a copy of it keeps them,
/// and arithmetic does not. Double quantisation takes the mean of all scales of the tensor.
///
/// # Shapes
///
/// - elements: `[n]`
/// - output: `[words]`, f32: about `bits / 32 · n`, where `bits` are those of an element
///
/// # Errors
///
/// - [`KernelError::Codes`] for a storage type without codes, and for one with a wrong block.
/// - [`KernelError::Dtype`] for dtypes other than f32, bf16 and f16.
/// - [`KernelError::Device`] if the device has no kernels.
pub fn encode(elements: Tensor<1>, storage: StorageType) -> Result<Tensor<1>, KernelError> {
    check_storage(storage)?;
    let numel = elements.shape().num_elements();
    let shape = Shape::from([storage.stored_len(numel)]);
    with_backend!(elements.device(), |B, _device| {
        let output = (shape.clone(), DType::F32);
        let encode = move |elements: Vec<_>| {
            let elements = elements.into_iter().next().expect("there is one input");
            let elements = Raw::<B>::cast(elements, DType::F32, None);
            let device = elements.device();
            vec![encoded::<Raw<B>>(elements, 0..numel, storage, shape, &device)]
        };
        Ok(give_one::<B>(B::defer(vec![take::<B>(elements)?], vec![output], encode)))
    })
}

/// Returns the first `numel` elements that [`encode`] has made codes of, rounded from f32 to `dtype`.
///
/// # Shapes
///
/// - codes: `[words]`, f32
/// - output: `[numel]`
///
/// # Errors
///
/// - [`KernelError::Codes`] for a storage type without codes, and for one with a wrong block.
/// - [`KernelError::Range`] if there are fewer codes than elements.
/// - [`KernelError::Dtype`] for codes in another dtype than f32, and if the device does not support
///   `dtype`.
/// - [`KernelError::Device`] if the device has no kernels.
pub fn decode(
    codes: Tensor<1>,
    storage: StorageType,
    numel: usize,
    dtype: FloatDType,
) -> Result<Tensor<1>, KernelError> {
    check_storage(storage)?;
    let words = 0..storage.stored_len(numel);
    check_range(&words, codes.shape().num_elements())?;
    if codes.dtype() != DType::F32 {
        let device = format!("{:?}", codes.device());
        return Err(KernelError::Dtype { dtype: codes.dtype(), device });
    }
    let codes = codes.slice([words]);
    with_backend!(codes.device(), |B, device| {
        check_dtype::<B>(&device, dtype.into())?;
        let shape = Shape::from([numel]);
        let output = (shape.clone(), dtype.into());
        let decode = move |codes: Vec<_>| {
            let codes = codes.into_iter().next().expect("there is one input");
            vec![Raw::<B>::decode(codes, storage, shape, dtype.into())]
        };
        Ok(give_one::<B>(B::defer(vec![take::<B>(codes)?], vec![output], decode)))
    })
}

/// Checks that a storage type has codes, and blocks of a valid size.
fn check_storage(storage: StorageType) -> Result<(), KernelError> {
    let without = (!storage.is_coded()).then_some("use `Int8` or `Nf4`");
    match without.or(storage.wrong_block()) {
        Some(expected) => Err(KernelError::Codes { storage, expected }),
        None => Ok(()),
    }
}
