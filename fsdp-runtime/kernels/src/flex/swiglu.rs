//! The activation of SwiGLU and its gradients, in one loop each.

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use multiversion::multiversion;

use super::exp::exp_of_negative;
use super::float::{KernelFloat, slice, with_float_type};
use super::loops::indexed;
use super::new_tensor::{TASK, Uninit, new_tensor, new_tensors_in_parts};

/// Implements [`Kernels::swiglu`](crate::Kernels::swiglu).
pub(super) fn forward(gate: &FlexTensor, up: &FlexTensor) -> FlexTensor {
    let (gate, up) = (gate.to_contiguous(), up.to_contiguous());
    with_float_type!(gate.dtype(), |E| {
        let (gates, ups) = (slice::<E>(&gate), slice::<E>(&up));
        new_tensor(gate.shape(), |at, output| {
            let range = at..at + output.len();
            forward_slice(&gates[range.clone()], &ups[range], output)
        })
    })
}

/// Implements [`Kernels::swiglu_backward`](crate::Kernels::swiglu_backward).
pub(super) fn backward(gate: &FlexTensor, up: &FlexTensor, grad: &FlexTensor) -> [FlexTensor; 2] {
    let (gate, up, grad) = (gate.to_contiguous(), up.to_contiguous(), grad.to_contiguous());
    with_float_type!(gate.dtype(), |E| {
        let inputs = [slice::<E>(&gate), slice::<E>(&up), slice::<E>(&grad)];
        let (grads, _) = new_tensors_in_parts(gate.shape(), TASK, |at, targets| {
            let range = at..at + targets[0].len();
            (backward_slice(inputs.map(|input| &input[range.clone()]), targets), ())
        });
        grads
    })
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
fn forward_slice<'a, E: KernelFloat>(
    gate: &[E],
    up: &[E],
    output: &'a mut Uninit<E>,
) -> &'a mut [E] {
    let up = &up[..gate.len()];
    indexed(gate, output, |at, gate| {
        let gate = gate.wide();
        E::narrow(gate * logistic(gate) * up[at].wide())
    })
}

/// Writes the gradients of gate and up.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
fn backward_slice<'a, E: KernelFloat>(
    [gate, up, grad]: [&[E]; 3],
    [gate_grad, up_grad]: [&'a mut Uninit<E>; 2],
) -> [&'a mut [E]; 2] {
    let len = gate.len();
    let (up, grad) = (&up[..len], &grad[..len]);
    assert_eq!((gate_grad.len(), up_grad.len()), (len, len));
    for at in 0..len {
        let (gate, grad) = (gate[at].wide(), grad[at].wide());
        let share = logistic(gate);
        let slope = share * (1.0 + gate * (1.0 - share));
        gate_grad[at].write(E::narrow(grad * up[at].wide() * slope));
        up_grad[at].write(E::narrow(grad * (gate * share)));
    }
    // SAFETY: the loop wrote every element of both.
    unsafe { [gate_grad.assume_init_mut(), up_grad.assume_init_mut()] }
}

/// Returns the logistic function `1 / (1 + e⁻ˣ)`.
#[inline(always)]
pub(super) fn logistic(x: f32) -> f32 {
    let power = exp_of_negative(-x.abs());
    let above = if x < 0.0 { power } else { 1.0 };
    above / (1.0 + power)
}

#[cfg(test)]
mod tests {
    use super::logistic;

    #[test]
    fn the_logistic_function_is_exact_to_the_last_places() {
        for x in (-8000..=8000).map(|i| i as f32 * 0.01) {
            let expected = 1.0 / (1.0 + (-f64::from(x)).exp());
            let error = (f64::from(logistic(x)) - expected).abs();
            assert!(error <= 3e-7 * expected, "{x}: {error:e} of {expected}");
        }
        assert!(logistic(f32::NAN).is_nan());
        assert_eq!([0.0, 200.0].map(logistic), [0.5, 1.0]);
    }
}
