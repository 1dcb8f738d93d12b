//! Dtypes of tensors in a checkpoint.

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

/// A dtype that a checkpoint can hold, under the name that safetensors gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each name is the dtype")]
#[non_exhaustive]
pub enum Dtype {
    F64,
    F32,
    F16,
    BF16,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
}

impl Dtype {
    const ALL: [(Self, DType); 12] = [
        (Self::F64, DType::F64),
        (Self::F32, DType::F32),
        (Self::F16, DType::F16),
        (Self::BF16, DType::BF16),
        (Self::I64, DType::I64),
        (Self::I32, DType::I32),
        (Self::I16, DType::I16),
        (Self::I8, DType::I8),
        (Self::U64, DType::U64),
        (Self::U32, DType::U32),
        (Self::U16, DType::U16),
        (Self::U8, DType::U8),
    ];

    /// Returns the equivalent of a Burn dtype; `None` for quantised and Boolean dtypes.
    pub fn of(dtype: DType) -> Option<Self> {
        Self::ALL.into_iter().find(|(_, burn)| *burn == dtype).map(|(this, _)| this)
    }

    /// Returns the equivalent Burn dtype.
    pub fn burn(self) -> DType {
        Self::ALL[self as usize].1
    }

    /// Returns the size of an element in bytes.
    pub fn size(self) -> usize {
        self.burn().size()
    }
}
