//! Mixed precision: the types in which parameters are gathered and computed with, gradients are
//! reduced, and outputs leave.
//!
//! Shards, gradients as the optimizer sees them and its state stay in f32 whatever the policy:
//! what is cast is this rank's shard, before it is sent, so that half the bytes travel and half
//! the bytes lie in the gather buffers.

use burn::tensor::{DType, Device, FloatDType};

use crate::backend::kernels::computes;
use crate::error::ShardError;

/// The types that a policy may set.
const KNOWN: [FloatDType; 3] = [FloatDType::F32, FloatDType::BF16, FloatDType::F16];

/// In which types a unit computes and communicates: PyTorch's `MixedPrecisionPolicy`.
///
/// ```
/// use burn::tensor::FloatDType;
/// use fsdp_runtime::{FsdpOptions, MixedPrecisionPolicy};
///
/// let policy = MixedPrecisionPolicy::new()
///     .with_param_dtype(FloatDType::BF16)
///     .with_reduce_dtype(FloatDType::F32)
///     .with_output_dtype(FloatDType::F32);
/// let options = FsdpOptions::new().with_mixed_precision(policy);
/// ```
///
/// The types are `F32`, `BF16` and `F16`. Under `F16` gradients underflow without a
/// [`GradScaler`](crate::GradScaler).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use]
pub struct MixedPrecisionPolicy {
    param_dtype: Option<FloatDType>,
    reduce_dtype: Option<FloatDType>,
    output_dtype: Option<FloatDType>,
    cast_forward_inputs: bool,
}

impl Default for MixedPrecisionPolicy {
    fn default() -> Self {
        Self::new()
    }
}

impl MixedPrecisionPolicy {
    /// Parameters are gathered in the type they are initialised in, `F32` as a rule, and gradients
    /// reduced in that of the gathered parameters, each in its own where a unit's matrices have
    /// several types.
    pub const fn new() -> Self {
        Self {
            param_dtype: None,
            reduce_dtype: None,
            output_dtype: None,
            cast_forward_inputs: true,
        }
    }

    /// The type that parameters are gathered in, and have in `forward` and `backward`; by default each
    /// has that in which it is initialised. A unit whose matrices then have several types is gathered
    /// in segments: one all-gather and one buffer for each type. It is one unit in all else. Vectors,
    /// which stay whole, may have any type. Plain tensor fields keep theirs, and so do the tables of
    /// `PositionalEncoding` and `RotaryEncoding`: cast where they are used. A `BatchNorm`, whose
    /// statistics are f32, must lie in a unit that computes in f32.
    pub const fn with_param_dtype(mut self, dtype: FloatDType) -> Self {
        self.param_dtype = Some(dtype);
        self
    }

    /// The type that gradients travel in when they are reduced; by default that of the unit's
    /// matrices, or, where these have several, each parameter's own. The sum over ranks is taken in
    /// `F32` all the same.
    pub const fn with_reduce_dtype(mut self, dtype: FloatDType) -> Self {
        self.reduce_dtype = Some(dtype);
        self
    }

    /// The type that float outputs are cast to as they leave the outermost unit, or, in a policy for
    /// certain units, as they leave those. By default they stay as they are.
    pub const fn with_output_dtype(mut self, dtype: FloatDType) -> Self {
        self.output_dtype = Some(dtype);
        self
    }

    /// Whether float inputs of a unit's `forward` are cast to the type of its matrices. On by default.
    /// Where these have several types, inputs stay as they are.
    pub const fn with_cast_forward_inputs(mut self, cast: bool) -> Self {
        self.cast_forward_inputs = cast;
        self
    }

    /// Whether the device can compute so.
    pub(crate) fn check(&self, device: &Device) -> Result<(), ShardError> {
        let dtypes = [
            ("param_dtype", self.param_dtype),
            ("reduce_dtype", self.reduce_dtype),
            ("output_dtype", self.output_dtype),
        ];
        for (option, dtype) in dtypes {
            let Some(dtype) = dtype else { continue };
            if KNOWN.contains(&dtype) && computes(device, dtype) {
                continue;
            }
            return Err(ShardError::InvalidOption {
                option,
                value: format!("{dtype:?}"),
                expected: format!(
                    "{device:?} computes in {}: use one of these",
                    computed(device).join(", ")
                ),
            });
        }
        Ok(())
    }

    /// The type that all parameters take, if it sets one.
    pub(crate) fn param(&self) -> Option<DType> {
        self.param_dtype.map(DType::from)
    }

    /// The type that a gradient travels in, of a parameter of type `own` in a unit whose matrices are
    /// all gathered in `unit`, if they have one type.
    pub(crate) fn reduce(&self, unit: Option<DType>, own: DType) -> DType {
        self.reduce_dtype.map_or(unit.unwrap_or(own), DType::from)
    }

    /// The policy of a unit whose matrices are all gathered in `unit`, if they have one type; `returns`
    /// says whether the output type is meant for it.
    pub(crate) fn resolve(&self, unit: Option<DType>, returns: bool) -> Precision {
        Precision {
            input: unit.filter(|_| self.cast_forward_inputs),
            output: self.output_dtype.filter(|_| returns).map(DType::from),
        }
    }
}

/// The types that a device computes in, by name.
pub(crate) fn computed(device: &Device) -> Vec<String> {
    let works = KNOWN.iter().filter(|dtype| computes(device, **dtype));
    works.map(|dtype| format!("{dtype:?}")).collect()
}

/// What types the inputs and outputs of one unit take; `None` leaves them as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Precision {
    /// Inputs, in the unit's own code.
    pub(crate) input: Option<DType>,
    /// Outputs.
    pub(crate) output: Option<DType>,
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn a_type_the_device_cannot_compute_names_those_it_can() {
        let device = Device::flex();
        let good = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);
        assert_eq!(good.check(&device), Ok(()));
        let error = good.with_reduce_dtype(FloatDType::F64).check(&device).unwrap_err().to_string();
        for part in ["reduce_dtype", "F64", "F32, BF16, F16"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn gradients_travel_in_the_parameters_type_by_default() {
        let policy = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::F16);
        let half = Some(DType::F16);
        assert_eq!(policy.reduce(half, DType::F32), DType::F16);
        assert_eq!(policy.reduce(None, DType::BF16), DType::BF16, "each in its own");
        let policy = policy.with_reduce_dtype(FloatDType::F32).with_output_dtype(FloatDType::F32);
        assert_eq!(policy.reduce(half, DType::F16), DType::F32);
        assert_eq!(policy.resolve(half, true).output, Some(DType::F32));
        assert_eq!(policy.resolve(half, false).output, None);
    }

    #[test]
    fn inputs_take_the_type_of_the_units_matrices_where_there_is_one() {
        let policy = MixedPrecisionPolicy::new();
        assert_eq!(policy.resolve(Some(DType::BF16), true).input, Some(DType::BF16));
        assert_eq!(policy.resolve(None, true).input, None);
        let policy = policy.with_cast_forward_inputs(false);
        assert_eq!(policy.resolve(Some(DType::BF16), true).input, None);
    }
}
