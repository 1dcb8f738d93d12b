//! The exact GELU and its gradient, in one kernel each. Computed in f32, by the formula of Flex.

use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::buffer_slice::BufferSlice;
use super::device::rounds_in_integers;
use super::rounding::narrowed;
use super::span::spans;
use super::tensors::{contiguous, element, empty};

/// Returns the density of the standard normal distribution, times √2π.
#[cube]
pub(super) fn bell<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    Vector::exp(x * x * Vector::new(-0.5f32))
}

/// Returns the standard normal distribution function of `x`, given `bell(x)`.
///
/// The approximation of erf has an error of at most 1.5e-7. Source: Abramowitz and Stegun,
/// *Handbook of Mathematical Functions*, formula 7.1.26.
#[cube]
pub(super) fn distribution<N: Size>(x: Vector<f32, N>, bell: Vector<f32, N>) -> Vector<f32, N> {
    let one = Vector::<f32, N>::new(1.0f32);
    // 0.3275911 / √2
    let t = one / (one + Vector::abs(x) * Vector::new(0.231_641_89f32));
    let polynomial = Vector::new(-1.453_152f32) + t * Vector::new(1.061_405_4f32);
    let polynomial = Vector::new(1.421_413_8f32) + t * polynomial;
    let polynomial = Vector::new(-0.284_496_74f32) + t * polynomial;
    let polynomial = Vector::new(0.254_829_6f32) + t * polynomial;
    let tail = Vector::new(0.5f32) * t * polynomial * bell;
    select_many(x.less_than(&Vector::<f32, N>::new(0.0f32)), tail, one - tail)
}

#[cube(launch_unchecked)]
fn gelu_kernel<F: Float, N: Size>(
    source: &[Vector<F, N>],
    target: &mut [Vector<F, N>],
    from: usize,
    to: usize,
    count: usize,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < count {
        let x = Vector::<f32, N>::cast_from(source[from + ABSOLUTE_POS]);
        let y = x * distribution(x, bell(x));
        target[to + ABSOLUTE_POS] = narrowed(y, integers);
    }
}

#[cube(launch_unchecked)]
fn gelu_backward_kernel<F: Float, N: Size>(
    source: &[Vector<F, N>],
    grads: &[Vector<F, N>],
    target: &mut [Vector<F, N>],
    from: usize,
    grads_from: usize,
    to: usize,
    count: usize,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < count {
        let x = Vector::<f32, N>::cast_from(source[from + ABSOLUTE_POS]);
        let grad = Vector::<f32, N>::cast_from(grads[grads_from + ABSOLUTE_POS]);
        let bell = bell(x);
        // 1 / √2π
        let density = bell * Vector::new(0.398_942_3f32);
        let slope = distribution(x, bell) + x * density;
        target[to + ABSOLUTE_POS] = narrowed(grad * slope, integers);
    }
}

/// Implements [`Kernels::gelu`](crate::Kernels::gelu).
pub(super) fn forward(tensor: CubeTensor) -> CubeTensor {
    let tensor = contiguous(tensor);
    let target = empty(&tensor, tensor.shape(), tensor.dtype);
    let (client, dtype) = (tensor.client.clone(), element(tensor.dtype));
    let slices = [&BufferSlice::of(&tensor), &BufferSlice::of(&target)];
    for span in spans(&client, &slices, tensor.shape().num_elements()) {
        let (count, dim) = span.grid(&client);
        let (read, from) = span.argument(slices[0]);
        let (write, to) = span.argument(slices[1]);
        let integers = rounds_in_integers(&client, tensor.dtype);
        // SAFETY: `spans` checked that both buffers hold the elements; the kernel accesses only the
        // span's vectors.
        unsafe {
            gelu_kernel::launch_unchecked(
                &client, count, dim, span.width, read, write, from, to, span.count, integers, dtype,
            );
        }
    }
    target
}

/// Implements [`Kernels::gelu_backward`](crate::Kernels::gelu_backward).
pub(super) fn backward(tensor: CubeTensor, grad: CubeTensor) -> CubeTensor {
    let (tensor, grad) = (contiguous(tensor), contiguous(grad));
    let target = empty(&tensor, tensor.shape(), tensor.dtype);
    let (client, dtype) = (tensor.client.clone(), element(tensor.dtype));
    let slices = [&tensor, &grad, &target].map(BufferSlice::of);
    for span in spans(&client, &slices.each_ref(), tensor.shape().num_elements()) {
        let (count, dim) = span.grid(&client);
        let [(read, from), (grads, grads_from), (write, to)] =
            slices.each_ref().map(|slice| span.argument(slice));
        // SAFETY: `spans` checked that the buffers hold the elements; the kernel accesses only the
        // span's vectors.
        unsafe {
            gelu_backward_kernel::launch_unchecked(
                &client,
                count,
                dim,
                span.width,
                read,
                grads,
                write,
                from,
                grads_from,
                to,
                span.count,
                rounds_in_integers(&client, tensor.dtype),
                dtype,
            );
        }
    }
    target
}

/// With Burn's fusion in the build, models do not use the kernels.
#[cfg(all(test, feature = "cpu", feature = "flex"))]
mod tests {
    use burn::backend::Flex;
    use burn::tensor::{DType, TensorData};
    use burn_cubecl::{CubeBackend, CubeDevice};

    use crate::Kernels;
    use crate::{cast, to_data};

    /// Returns the GELU of some numbers and the gradient, computed from tensors of `dtype`.
    fn gelu<B: Kernels>(device: &B::Device, numbers: &[f32], dtype: DType) -> [Vec<f32>; 2] {
        let len = numbers.len();
        let tensor = |values: Vec<f32>| {
            let values = B::float_from_data(TensorData::new(values, [len]), device);
            cast::<B>(values, dtype)
        };
        let x = || tensor(numbers.to_vec());
        let grads = tensor((0..len).map(|at| (at % 5) as f32 * 0.5 - 1.0).collect());
        let results = [<B as Kernels>::gelu(x()), <B as Kernels>::gelu_backward(x(), grads)];
        results.map(|result| to_data::<B>(cast::<B>(result, DType::F32)).iter().collect())
    }

    #[test]
    fn values_and_gradients_are_those_of_flex() {
        let device = CubeDevice::Cpu(cubecl::device::CpuDevice);
        for (dtype, rounding) in [(DType::F32, 1e-6), (DType::F16, 1.0 / 1024.0)] {
            for len in [1, 7, 64, 10_001] {
                // Multiples of 1/16 up to 20 are exact in f16.
                let numbers: Vec<f32> =
                    (0..len).map(|at| (at % 641) as f32 / 16.0 - 20.0).collect();
                let found = gelu::<CubeBackend>(&device, &numbers, dtype);
                let expected = gelu::<Flex>(&Default::default(), &numbers, DType::F32);
                for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                    let most = rounding * expected.abs().max(1.0);
                    assert!((found - expected).abs() <= most, "{found} {expected} {dtype:?}");
                }
            }
        }
    }
}
