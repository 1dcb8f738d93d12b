//! Recomputation of a part of a forward.

use burn::tensor::Tensor;

use crate::backend::ops::recompute_tracked;
use crate::module::{RunningForward, UnitValue};

/// Computes `f(inputs)` and keeps only the inputs for backward, which runs `f` again.
///
/// This is PyTorch's `torch.utils.checkpoint.checkpoint` for a few operations, where
/// [`ActivationCheckpointing`](crate::options::ActivationCheckpointing) recomputes whole units. The first run
/// records no graph, so what `f` computes on the way is freed at once. Both runs draw the same masks from
/// [`Dropout`](super::Dropout), and results and gradients have the bits that `f(inputs)` has by itself, if
/// no input is used by several operations of `f`; else gradients are added up in another order.
///
/// `f` owns what it captures, so a table or a configuration behind a reference is cloned into it. Every
/// tracked tensor that `f` depends on is one of `inputs`, parameters included:
/// `recompute((x, self.up.weight.val()), |(x, up)| ..)`. That works inside of a sharded unit, whose
/// parameters are gathered again before its backward. A module inside of `f`, which reads its own
/// parameters, is an error. If no input is tracked, as on devices without autodiff, this function calls
/// `f`.
///
/// # Panics
///
/// Unwinds with [`ScheduleError::RecomputedCapture`](crate::errors::ScheduleError::RecomputedCapture) if `f`
/// depends on a tracked tensor that is not an input, and in backward if `f` draws other masks than in its
/// first run.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use fsdp_runtime::nn::{gelu, recompute};
///
/// # fn main() {
/// # #[cfg(feature = "flex")] {
/// let device = Device::flex().autodiff();
/// let x = Tensor::<2>::ones([4, 8], &device).require_grad();
/// let up = Tensor::<2>::ones([8, 32], &device).require_grad();
/// // The product, 32 numbers wide, is not kept for backward.
/// let y = recompute((x.clone(), up.clone()), |(x, up)| gelu(x.matmul(up)).sum_dim(1));
/// let gradients = y.sum().backward();
/// assert!(x.grad(&gradients).is_some() && up.grad(&gradients).is_some());
/// # }
/// # }
/// ```
pub fn recompute<I, const D: usize>(
    inputs: I,
    f: impl Fn(I) -> Tensor<D> + Send + 'static,
) -> Tensor<D>
where
    I: UnitValue + Clone + Send + 'static,
{
    let Some(forward) = RunningForward::state() else { return recompute_tracked(inputs, f) };
    // Attention among context parallel ranks finds them in backward too.
    recompute_tracked(inputs, move |inputs| {
        let _running = forward.resume();
        f(inputs)
    })
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use burn::tensor::{Device, Distribution};

    use super::*;
    use crate::error::{Error, ScheduleError};
    use crate::nn::{DropoutConfig, gelu};

    fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        tensor.into_data().iter().collect()
    }

    #[test]
    fn results_and_gradients_have_the_same_bits() {
        let device = Device::flex().autodiff();
        device.seed(2);
        let random = |shape| Tensor::<2>::random(shape, Distribution::Default, &device);
        let (x, up, frozen) = (random([30, 8]), random([8, 40]), random([1, 40]));
        let (x, up) = (x.require_grad(), up.require_grad());
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        let f = move |(x, up, frozen): (Tensor<2>, Tensor<2>, Tensor<2>)| {
            counted.fetch_add(1, Ordering::Relaxed);
            gelu(x.matmul(up) + frozen)
        };
        let run = |recomputes: bool| {
            let inputs = (x.clone().mul_scalar(2.0), up.clone(), frozen.clone());
            let y = if recomputes { recompute(inputs, f.clone()) } else { f(inputs) };
            let gradients = y.clone().powi_scalar(2).sum().backward();
            let [x, up] = [&x, &up].map(|tensor| numbers(tensor.grad(&gradients).unwrap()));
            (numbers(y.inner()), x, up)
        };
        let expected = run(false);
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        assert_eq!(run(true), expected);
        assert_eq!(calls.load(Ordering::Relaxed), 3, "once in forward and once in backward");
    }

    #[test]
    fn dropout_draws_the_same_mask_again() {
        let device = Device::flex().autodiff();
        let dropout = DropoutConfig::new(0.5).init();
        let x = Tensor::<1>::ones([1000], &device).require_grad();
        let (inner, outer) = (dropout.clone(), dropout.clone());
        let y = recompute(x.clone(), move |x| {
            let inner = inner.clone();
            recompute(outer.forward(x), move |x| inner.forward(x))
        });
        // Draws in between do not matter.
        dropout.forward(x.clone());
        let gradients = y.clone().sum().backward();
        let (y, gradient) = (numbers(y.inner()), numbers(x.grad(&gradients).unwrap()));
        assert_eq!(y, gradient);
        assert!(y.contains(&0.0) && y.contains(&4.0));
    }

    #[test]
    fn a_captured_tracked_tensor_is_an_error() {
        let device = Device::flex().autodiff();
        let x = Tensor::<1>::ones([4], &device).require_grad();
        let weight = Tensor::<1>::ones([4], &device).require_grad();
        let captured = std::panic::AssertUnwindSafe(|| recompute(x, move |x| x * weight.clone()));
        let error = std::panic::catch_unwind(captured).unwrap_err();
        let error = error.downcast::<Error>().expect("a typed error");
        assert_eq!(*error, ScheduleError::RecomputedCapture.into());
        assert!(error.to_string().contains("self.up.weight.val()"), "{error}");
    }

    #[test]
    fn without_a_tracked_input_the_function_is_called() {
        let x = Tensor::<1>::ones([4], &Device::flex());
        assert_eq!(numbers(recompute(x, |x| x + 1.0)), [2.0; 4]);
        let x = Tensor::<1>::ones([4], &Device::flex().autodiff());
        assert!(!recompute(x, |x| x + 1.0).is_require_grad());
        assert_eq!(
            numbers(recompute(3.0f32, |x| Tensor::<1>::full([1], x, &Device::flex()))),
            [3.0]
        );
    }
}
