//! Errors of the public kernel functions.

use std::ops::Range;

use burn::tensor::DType;

use crate::error::ShardError;
use crate::layout::StorageType;

/// Reason why a kernel cannot run with its arguments.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A device that has no kernels.
    #[error(transparent)]
    Device(#[from] ShardError),
    /// A dtype that is none of f32, bf16 and f16, or that the device does not support.
    #[error(
        "no kernel for {dtype:?} on {device}; use one of f32, bf16 and f16 that the device supports"
    )]
    Dtype {
        /// The unsupported dtype.
        dtype: DType,
        /// The tensor's device, in its `Debug` form.
        device: String,
    },
    /// Parts of a mean that differ in dtype.
    #[error("the parts have dtypes {first:?} and {other:?}; cast them to one dtype")]
    SeveralDtypes {
        /// Dtype of the first part.
        first: DType,
        /// Dtype of the first part that differs.
        other: DType,
    },
    /// Tensors that are on several devices.
    #[error("a tensor is on {device}, another device than the other tensors; move all to one")]
    OtherDevice {
        /// Device of the tensor that differs, in its `Debug` form.
        device: String,
    },
    /// A range that exceeds a tensor.
    #[error("elements {range:?} of a tensor of {len} elements; end at {len} or before")]
    Range {
        /// Range of the requested elements.
        range: Range<usize>,
        /// Number of elements of the tensor.
        len: usize,
    },
    /// Two parts that overlap in a buffer.
    #[error("parts for the elements {first:?} and {second:?} overlap; move one of them")]
    Overlap {
        /// Elements of the part with the smaller offset.
        first: Range<usize>,
        /// Elements of the other part.
        second: Range<usize>,
    },
    /// A storage type whose codes cannot be made or read.
    #[error("{storage} has no codes; {expected}")]
    Codes {
        /// The storage type.
        storage: StorageType,
        /// What is right.
        expected: &'static str,
    },
    /// A mean of no parts.
    #[error("a mean has no parts; give at least one")]
    NoParts,
}
