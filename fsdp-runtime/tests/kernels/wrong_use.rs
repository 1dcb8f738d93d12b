//! Arguments that a kernel refuses with a typed error.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use fsdp_runtime::kernels::{self, KernelError};

use super::support::{device, tensor};

fn zeros(len: usize) -> Tensor<1> {
    Tensor::zeros([len], &Device::flex())
}

#[test]
fn a_part_beyond_the_buffer_is_refused() {
    let error = kernels::pack(vec![(zeros(5), 6)], zeros(10)).unwrap_err();
    assert_eq!(error, KernelError::Range { range: 6..11, len: 10 });
    assert!(error.to_string().contains("end at 10"), "{error}");
    let error = kernels::unpack(zeros(10), &[0..3, 8..12], FloatDType::F32, None).unwrap_err();
    assert_eq!(error, KernelError::Range { range: 8..12, len: 10 });
    let error = kernels::mean(&[zeros(10), zeros(4)], 2..6, 2).unwrap_err();
    assert_eq!(error, KernelError::Range { range: 2..6, len: 4 });
}

#[test]
fn parts_that_overlap_are_refused() {
    let parts = vec![(zeros(4), 4), (zeros(5), 0), (zeros(0), 2)];
    let error = kernels::pack(parts, zeros(10)).unwrap_err();
    assert_eq!(error, KernelError::Overlap { first: 0..5, second: 4..8 });
}

#[test]
fn a_mean_needs_parts_of_one_dtype() {
    assert_eq!(kernels::mean(&[], 0..0, 1).unwrap_err(), KernelError::NoParts);
    let half = zeros(4).cast(FloatDType::F16);
    let error = kernels::mean(&[zeros(4), half], 0..4, 2).unwrap_err();
    assert_eq!(error, KernelError::SeveralDtypes { first: DType::F32, other: DType::F16 });
}

#[test]
fn other_dtypes_are_refused() {
    let error = kernels::cast(zeros(4), FloatDType::F64, None).unwrap_err();
    assert!(matches!(error, KernelError::Dtype { dtype: DType::F64, .. }), "{error}");
    let wide = zeros(4).cast(FloatDType::F64);
    let error = kernels::norm_sums(&[wide], fsdp_runtime::Norm::Two).unwrap_err();
    assert!(matches!(error, KernelError::Dtype { dtype: DType::F64, .. }), "{error}");
}

#[test]
fn a_tensor_on_another_device_is_refused() {
    let Some(device) = device() else { return };
    let there = tensor(&[1.0, 2.0], &device, FloatDType::F32);
    let error = kernels::pack(vec![(there, 0)], zeros(4)).unwrap_err();
    assert!(matches!(error, KernelError::OtherDevice { .. }), "{error}");
}
