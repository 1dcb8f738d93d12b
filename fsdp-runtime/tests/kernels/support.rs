//! Devices, numbers and comparisons.

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use fsdp_runtime::kernels;

use crate::compare::{self, Within};

pub const DTYPES: [FloatDType; 3] = [FloatDType::F32, FloatDType::BF16, FloatDType::F16];

/// Lengths: empty, one element, less than a vector, whole vectors, odd and more than a block,
/// several tasks.
pub const LENGTHS: [usize; 6] = [0, 1, 7, 64, 1031, 70_001];

/// Returns the CubeCL device to test, if one is compiled in.
#[allow(clippy::needless_return, reason = "which device is a matter of features")]
pub fn device() -> Option<Device> {
    #[cfg(feature = "cube")]
    if std::env::var_os("BURN_DEVICE").is_some() {
        return Some(Device::default());
    }
    #[cfg(feature = "cpu")]
    return Some(Device::cpu());
    #[cfg(all(feature = "cube", not(feature = "cpu")))]
    return Some(Device::default());
    #[cfg(not(feature = "cube"))]
    {
        eprintln!("skipped: no CubeCL device is compiled in; use `--features cpu`");
        return None;
    }
}

/// Returns Flex, and the CubeCL device where there is one.
pub fn devices() -> impl Iterator<Item = Device> {
    [Some(Device::flex()), device()].into_iter().flatten()
}

/// Returns the dtypes that the device supports.
pub fn dtypes(device: &Device) -> impl Iterator<Item = FloatDType> + use<> {
    let all: Vec<_> =
        DTYPES.into_iter().filter(|&dtype| kernels::computes(device, dtype)).collect();
    assert!(all.contains(&FloatDType::F32), "{device:?} supports {all:?}");
    all.into_iter()
}

/// Returns the dtype that rounds as the products of matrices of `dtype` do. On NVIDIA's GPUs, CubeCL computes
/// those of f32 in TF32, which has the 11 significant bits of f16.
pub fn product_dtype(device: &Device, dtype: FloatDType) -> FloatDType {
    let is_cuda = format!("{device:?}").contains("Cuda");
    if is_cuda && dtype == FloatDType::F32 { FloatDType::F16 } else { dtype }
}

/// Returns pseudo-random numbers of every size: zero, subnormal, and up to `largest`.
pub fn numbers(seed: u64, len: usize, largest: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let number = |_| {
        let bits = next();
        let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
        let share = (bits >> 40) as f32 / (1u32 << 24) as f32;
        let size = match bits >> 1 & 15 {
            0 => 0.0,
            1 => 1e-39,
            2 => 1e-6,
            3..8 => 1e-2,
            8..12 => 0.1,
            _ => 1.0,
        };
        sign * share * size * largest
    };
    (0..len).map(number).collect()
}

pub fn tensor(values: &[f32], device: &Device, dtype: FloatDType) -> Tensor<1> {
    Tensor::from_data(
        TensorData::new(values.to_vec(), [values.len()]),
        (device, DType::from(dtype)),
    )
}

/// Returns the elements.
pub fn elements_of<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    tensor.to_data().iter::<f64>().collect()
}

/// Returns the tensor in f64, on Flex.
pub fn exact<const D: usize>(tensor: &Tensor<D>) -> Tensor<D> {
    let data = TensorData::new(elements_of(tensor), tensor.dims());
    Tensor::from_data(data, (&Device::flex(), DType::F64))
}

/// Returns the result of a function, and the gradient of the result's sum weighted by `weights`.
pub fn with_gradient<const D: usize>(
    function: impl Fn(Tensor<D>) -> Tensor<D>,
    x: Tensor<D>,
    weights: Tensor<D>,
) -> [Vec<f64>; 2] {
    let x = Tensor::from_inner(x).require_grad();
    let y = function(x.clone());
    assert_eq!((y.dims(), y.dtype()), (x.dims(), x.dtype()));
    let gradients = (y.clone() * Tensor::from_inner(weights)).sum().backward();
    let gradient = x.grad(&gradients).expect("a gradient");
    [y.inner(), gradient].map(|tensor| elements_of(&tensor))
}

/// Returns the bits of the elements. Every NaN has the same bits here. Subnormals of bf16, and the
/// least normal number, to which a subnormal may round, have the bits of 0: instructions that round
/// to bf16 may flush subnormals.
pub fn bits(tensor: &Tensor<1>) -> Vec<u32> {
    let flush = tensor.dtype() == DType::BF16;
    let canonical = |x: f32| match x {
        x if x.is_nan() => f32::NAN.to_bits(),
        x if flush && x.abs() <= f32::MIN_POSITIVE => 0f32.copysign(x).to_bits(),
        x => x.to_bits(),
    };
    tensor.to_data().iter::<f32>().map(canonical).collect()
}

/// Asserts that elements are equal to a tolerance, relative to those of `expected` or to 1e-3 where
/// they are below.
#[track_caller]
pub fn assert_close(found: &Tensor<1>, expected: &Tensor<1>, tolerance: f64, what: &str) {
    let elements = |tensor: &Tensor<1>| tensor.to_data().iter::<f32>().collect::<Vec<_>>();
    let within = Within::ScaledFrom { least: 1e-3, share: tolerance };
    let (found, expected) = (elements(found), elements(expected));
    // A tensor may be empty: then both must be.
    if !(found.is_empty() && expected.is_empty()) {
        compare::assert_close(&found, &expected, within, what);
    }
}

/// Asserts that a kernel has returned as many results as there are expected ones, at least one.
#[track_caller]
pub fn assert_as_many<A, B>(found: &[A], expected: &[B]) {
    assert_eq!(found.len(), expected.len());
    assert!(!expected.is_empty());
}

/// Returns whether division and square root on the device are rounded as IEEE 754 requires. Only
/// then a kernel has the bits of the one on Flex. WebGPU allows an error.
pub fn rounds_correctly(device: &Device) -> bool {
    !format!("{device:?}").to_lowercase().contains("wgpu")
}
