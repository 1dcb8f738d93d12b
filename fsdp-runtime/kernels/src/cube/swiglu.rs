//! The activation of SwiGLU and its gradients, in one kernel each. Computed in f32.

use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::buffer_slice::BufferSlice;
use super::device::rounds_in_integers;
use super::rounding::narrowed;
use super::span::spans;
use super::tensors::{contiguous, element, empty};

/// Returns the logistic function `1 / (1 + e⁻ˣ)`.
#[cube]
pub(super) fn logistic<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let (zero, one) = (Vector::<f32, N>::new(0.0f32), Vector::<f32, N>::new(1.0f32));
    let power = Vector::exp(zero - Vector::abs(x));
    select_many(x.less_than(&zero), power, one) / (one + power)
}

#[cube(launch_unchecked)]
fn swiglu_kernel<F: Float, N: Size>(
    gates: &[Vector<F, N>],
    ups: &[Vector<F, N>],
    target: &mut [Vector<F, N>],
    gates_from: usize,
    ups_from: usize,
    to: usize,
    count: usize,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < count {
        let gate = Vector::<f32, N>::cast_from(gates[gates_from + ABSOLUTE_POS]);
        let up = Vector::<f32, N>::cast_from(ups[ups_from + ABSOLUTE_POS]);
        target[to + ABSOLUTE_POS] = narrowed(gate * logistic(gate) * up, integers);
    }
}

#[cube(launch_unchecked)]
fn swiglu_backward_kernel<F: Float, N: Size>(
    gates: &[Vector<F, N>],
    ups: &[Vector<F, N>],
    grads: &[Vector<F, N>],
    gate_grads: &mut [Vector<F, N>],
    up_grads: &mut [Vector<F, N>],
    gates_from: usize,
    ups_from: usize,
    grads_from: usize,
    gate_grads_to: usize,
    up_grads_to: usize,
    count: usize,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < count {
        let gate = Vector::<f32, N>::cast_from(gates[gates_from + ABSOLUTE_POS]);
        let up = Vector::<f32, N>::cast_from(ups[ups_from + ABSOLUTE_POS]);
        let grad = Vector::<f32, N>::cast_from(grads[grads_from + ABSOLUTE_POS]);
        let share = logistic(gate);
        let one = Vector::<f32, N>::new(1.0f32);
        let slope = share * (one + gate * (one - share));
        gate_grads[gate_grads_to + ABSOLUTE_POS] = narrowed(grad * up * slope, integers);
        up_grads[up_grads_to + ABSOLUTE_POS] = narrowed(grad * (gate * share), integers);
    }
}

/// Implements [`Kernels::swiglu`](crate::Kernels::swiglu).
pub(super) fn forward(gate: CubeTensor, up: CubeTensor) -> CubeTensor {
    let (gate, up) = (contiguous(gate), contiguous(up));
    let target = empty(&gate, gate.shape(), gate.dtype);
    let client = gate.client.clone();
    let slices = [&gate, &up, &target].map(BufferSlice::of);
    for span in spans(&client, &slices.each_ref(), gate.shape().num_elements()) {
        let (count, dim) = span.grid(&client);
        let [(gates, gates_from), (ups, ups_from), (write, to)] =
            slices.each_ref().map(|slice| span.argument(slice));
        // SAFETY: `spans` checked that the buffers hold the elements; the kernel accesses only the
        // span's vectors.
        unsafe {
            swiglu_kernel::launch_unchecked(
                &client,
                count,
                dim,
                span.width,
                gates,
                ups,
                write,
                gates_from,
                ups_from,
                to,
                span.count,
                rounds_in_integers(&client, gate.dtype),
                element(gate.dtype),
            );
        }
    }
    target
}

/// Implements [`Kernels::swiglu_backward`](crate::Kernels::swiglu_backward).
pub(super) fn backward(gate: CubeTensor, up: CubeTensor, grad: CubeTensor) -> [CubeTensor; 2] {
    let (gate, up, grad) = (contiguous(gate), contiguous(up), contiguous(grad));
    let targets = [(); 2].map(|()| empty(&gate, gate.shape(), gate.dtype));
    let client = gate.client.clone();
    let slices = [&gate, &up, &grad, &targets[0], &targets[1]].map(BufferSlice::of);
    for span in spans(&client, &slices.each_ref(), gate.shape().num_elements()) {
        let (count, dim) = span.grid(&client);
        let [gates, ups, grads, gate_grads, up_grads] =
            slices.each_ref().map(|slice| span.argument(slice));
        // SAFETY: `spans` checked that the buffers hold the elements; the kernel accesses only the
        // span's vectors.
        unsafe {
            swiglu_backward_kernel::launch_unchecked(
                &client,
                count,
                dim,
                span.width,
                gates.0,
                ups.0,
                grads.0,
                gate_grads.0,
                up_grads.0,
                gates.1,
                ups.1,
                grads.1,
                gate_grads.1,
                up_grads.1,
                span.count,
                rounds_in_integers(&client, gate.dtype),
                element(gate.dtype),
            );
        }
    }
    targets
}

#[cfg(all(test, feature = "cpu", feature = "flex"))]
mod tests {
    use burn::backend::Flex;
    use burn::tensor::{DType, TensorData};
    use burn_cubecl::{CubeBackend, CubeDevice};

    use crate::Kernels;
    use crate::{cast, to_data};

    /// Returns the activation of some numbers and both gradients, computed from tensors of `dtype`.
    fn swiglu<B: Kernels>(device: &B::Device, len: usize, dtype: DType) -> [Vec<f32>; 3] {
        // Multiples of 1/16 up to 20 are exact in f16.
        let tensor = |step: usize| {
            let number = |at: usize| (at * step % 641) as f32 / 16.0 - 20.0;
            let values: Vec<f32> = (0..len).map(number).collect();
            cast::<B>(B::float_from_data(TensorData::new(values, [len]), device), dtype)
        };
        let (gate, up) = (|| tensor(1), || tensor(7));
        let [gate_grad, up_grad] = B::swiglu_backward(gate(), up(), tensor(11));
        let results = [<B as Kernels>::swiglu(gate(), up()), gate_grad, up_grad];
        results.map(|result| to_data::<B>(cast::<B>(result, DType::F32)).iter().collect())
    }

    #[test]
    fn values_and_gradients_are_those_of_flex() {
        let device = CubeDevice::Cpu(cubecl::device::CpuDevice);
        for (dtype, rounding) in [(DType::F32, 2e-6), (DType::F16, 1.0 / 1024.0)] {
            for len in [1, 7, 64, 10_001] {
                let found = swiglu::<CubeBackend>(&device, len, dtype);
                let expected = swiglu::<Flex>(&Default::default(), len, DType::F32);
                for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                    let most = rounding * expected.abs().max(1.0);
                    assert!((found - expected).abs() <= most, "{found} {expected} {dtype:?}");
                }
            }
        }
    }
}
