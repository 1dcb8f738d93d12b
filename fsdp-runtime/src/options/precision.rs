//! Mixed precision: the dtypes in which parameters are gathered and computed with, gradients are
//! reduced, and outputs are returned.
//!
//! Shards, the gradients that the optimizer gets, and optimizer state are f32 under every policy.
//! Each rank casts its shards before it sends them, so that a 16-bit dtype halves both the traffic
//! and the gather buffers.

use burn::tensor::{DType, Device, FloatDType};
use fsdp_kernels::computes;
use serde::{Deserialize, Serialize};

use crate::error::ShardError;

/// Dtypes that a policy may set.
const SUPPORTED: [FloatDType; 3] = [FloatDType::F32, FloatDType::BF16, FloatDType::F16];

/// The dtypes in which a unit computes and communicates: PyTorch's `MixedPrecisionPolicy`.
///
/// ```
/// use burn::tensor::FloatDType;
/// use fsdp_runtime::options::MixedPrecisionPolicy;
/// use fsdp_runtime::FsdpOptions;
///
/// let policy = MixedPrecisionPolicy::new()
///     .with_param_dtype(FloatDType::BF16)
///     .with_reduce_dtype(FloatDType::F32)
///     .with_output_dtype(FloatDType::F32);
/// let options = FsdpOptions::new().with_mixed_precision(policy);
/// ```
///
/// A dtype is `F32`, `BF16` or `F16`. With `F16`, small gradients underflow to zero without a
/// [`GradScaler`](crate::optim::GradScaler).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
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
    /// Returns a policy that changes no dtype: each parameter is gathered in the dtype in which it
    /// is initialised, usually `F32`, and gradients are reduced in the dtype of the gathered
    /// parameters.
    pub const fn new() -> Self {
        Self {
            param_dtype: None,
            reduce_dtype: None,
            output_dtype: None,
            cast_forward_inputs: true,
        }
    }

    /// Sets the dtype of parameters in all-gather, forward and backward. Default: the dtype in
    /// which each parameter is initialised.
    ///
    /// By default the matrices of one unit may have several dtypes. Such a unit has one all-gather
    /// and one gather buffer for each dtype, and counts as one unit otherwise. Vectors, which are
    /// replicated, may have any dtype.
    ///
    /// Tensors in fields that are no parameters, such as masks and the table of `PositionalEncoding`,
    /// have this dtype during a forward too, unless
    /// [`buffer_dtype`](crate::FsdpOptions::with_buffer_dtype) says another. A `BatchNorm`, whose
    /// running statistics are f32, must be in a unit that computes in f32.
    pub const fn with_param_dtype(mut self, dtype: FloatDType) -> Self {
        self.param_dtype = Some(dtype);
        self
    }

    /// Sets the dtype in which gradients are sent when they are reduced. Default: the dtype of the
    /// unit's matrices, or of each parameter if the unit's matrices have several dtypes.
    ///
    /// The sum over ranks is computed in `F32` in every case.
    pub const fn with_reduce_dtype(mut self, dtype: FloatDType) -> Self {
        self.reduce_dtype = Some(dtype);
        self
    }

    /// Sets the dtype of the float outputs of the outermost unit. In a policy for certain units, it
    /// is the dtype of the outputs of these units. Default: outputs are not cast.
    pub const fn with_output_dtype(mut self, dtype: FloatDType) -> Self {
        self.output_dtype = Some(dtype);
        self
    }

    /// Sets whether float inputs of a unit's `forward` are cast to the dtype of the unit's
    /// matrices. Default: on.
    ///
    /// If the matrices have several dtypes, inputs are not cast.
    pub const fn with_cast_forward_inputs(mut self, cast: bool) -> Self {
        self.cast_forward_inputs = cast;
        self
    }

    /// Checks that `device` supports the dtypes of the policy.
    pub(crate) fn check(&self, device: &Device) -> Result<(), ShardError> {
        let dtypes = [
            ("param_dtype", self.param_dtype),
            ("reduce_dtype", self.reduce_dtype),
            ("output_dtype", self.output_dtype),
        ];
        for (option, dtype) in dtypes {
            if let Some(dtype) = dtype {
                check_dtype(option, dtype, device)?;
            }
        }
        Ok(())
    }

    /// Returns the dtype of all parameters, if the policy sets one.
    pub(crate) fn param(&self) -> Option<DType> {
        self.param_dtype.map(DType::from)
    }

    /// Returns the dtype in which the gradient of a parameter of dtype `own` is sent. `unit` is the
    /// dtype of the unit's matrices, if they have one dtype.
    pub(crate) fn reduce(&self, unit: Option<DType>, own: DType) -> DType {
        self.reduce_dtype.map_or(unit.unwrap_or(own), DType::from)
    }

    /// Returns the casts of a unit. `unit` is the dtype of the unit's matrices, if they have one
    /// dtype; `returns` says whether the output dtype applies to the unit.
    pub(crate) fn resolve(&self, unit: Option<DType>, returns: bool) -> Precision {
        Precision {
            input: unit.filter(|_| self.cast_forward_inputs),
            output: self.output_dtype.filter(|_| returns).map(DType::from),
            params: self.param(),
        }
    }
}

/// Checks that `device` supports the dtype that an option sets.
pub(super) fn check_dtype(
    option: &'static str,
    dtype: FloatDType,
    device: &Device,
) -> Result<(), ShardError> {
    if SUPPORTED.contains(&dtype) && computes(device, dtype) {
        return Ok(());
    }
    let supported = computed(device).join(", ");
    Err(ShardError::InvalidOption {
        option,
        value: format!("{dtype:?}"),
        expected: format!("use a dtype that {device:?} supports: {supported}"),
    })
}

/// Returns the names of the dtypes that a device supports.
pub(crate) fn computed(device: &Device) -> Vec<String> {
    let works = SUPPORTED.iter().filter(|dtype| computes(device, **dtype));
    works.map(|dtype| format!("{dtype:?}")).collect()
}

/// The dtypes to which the inputs, outputs and tables of one unit are cast; `None` for no cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Precision {
    /// Dtype of the inputs inside the unit's `forward`.
    pub(crate) input: Option<DType>,
    /// Dtype of the outputs that `forward` returns.
    pub(crate) output: Option<DType>,
    /// `param_dtype` of the policy, the default dtype of tables inside the unit's `forward`.
    pub(crate) params: Option<DType>,
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn an_unsupported_dtype_names_the_supported_ones() {
        let device = Device::flex();
        let good = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);
        assert_eq!(good.check(&device), Ok(()));
        let error = good.with_reduce_dtype(FloatDType::F64).check(&device).unwrap_err().to_string();
        for part in ["reduce_dtype", "F64", "F32, BF16, F16"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn gradients_are_sent_in_the_dtype_of_the_parameters_by_default() {
        let policy = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::F16);
        let half = Some(DType::F16);
        assert_eq!(policy.reduce(half, DType::F32), DType::F16);
        assert_eq!(
            policy.reduce(None, DType::BF16),
            DType::BF16,
            "the dtype of the parameter itself"
        );
        let policy = policy.with_reduce_dtype(FloatDType::F32).with_output_dtype(FloatDType::F32);
        assert_eq!(policy.reduce(half, DType::F16), DType::F32);
        assert_eq!(policy.resolve(half, true).output, Some(DType::F32));
        assert_eq!(policy.resolve(half, false).output, None);
    }

    #[test]
    fn inputs_are_cast_to_the_one_dtype_of_the_units_matrices() {
        let policy = MixedPrecisionPolicy::new();
        assert_eq!(policy.resolve(Some(DType::BF16), true).input, Some(DType::BF16));
        assert_eq!(policy.resolve(None, true).input, None);
        let policy = policy.with_cast_forward_inputs(false);
        assert_eq!(policy.resolve(Some(DType::BF16), true).input, None);
    }
}
