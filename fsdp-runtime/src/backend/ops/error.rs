//! What is wrong with a kernel's arguments.

use std::ops::Range;

use burn::tensor::DType;

use crate::error::ShardError;

/// Why a kernel cannot run on what it was given.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A device without kernels.
    #[error(transparent)]
    Device(#[from] ShardError),
    /// A dtype the kernels do not take, or the device does not compute.
    #[error("no kernel for {dtype:?} on {device}; use f32, bf16 or f16, as the device computes")]
    Dtype {
        /// The dtype.
        dtype: DType,
        /// The device.
        device: String,
    },
    /// Parts of several dtypes where one is asked for.
    #[error("the parts are {first:?} and {other:?}; cast them to one dtype")]
    SeveralDtypes {
        /// The first part's.
        first: DType,
        /// Another part's.
        other: DType,
    },
    /// Tensors on several devices.
    #[error("a tensor lies on {device}, another device than the others; move them to one")]
    OtherDevice {
        /// Where it lies.
        device: String,
    },
    /// Elements that a tensor does not have.
    #[error("elements {range:?} of a tensor of {len} elements; end at {len} or before")]
    Range {
        /// The elements asked for.
        range: Range<usize>,
        /// Elements there are.
        len: usize,
    },
    /// Two parts for the same elements of a buffer.
    #[error("parts for the elements {first:?} and {second:?} overlap; move one of them")]
    Overlap {
        /// The part that begins first.
        first: Range<usize>,
        /// The other one.
        second: Range<usize>,
    },
    /// A mean of nothing.
    #[error("a mean has no parts; give at least one")]
    NoParts,
}
