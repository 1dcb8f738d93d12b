//! Layer norm and RMS norm as one operation, which saves the normalized rows' input and gamma for
//! backward. With a residual it has two results.

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::{DType, Shape, Tensor};
use fsdp_kernels::{
    Float, Kernels, NormalizationGrads, NormalizationRule, NormalizationTensors, Normalized,
    Tracked,
};

use super::arguments::{Taken, check_dtype, register_gradients, take_all};
use super::error::KernelError;
use super::two_results::{ResultGrads, two_results};
use crate::backend::model_backend::{FloatTensor, ModelBackend, with_backend};

/// Tensors to be normalized.
pub(crate) struct NormalizationInputs<'a, const D: usize> {
    pub(crate) input: &'a Tensor<D>,
    /// Tensor that is added to the input first.
    pub(crate) residual: Option<&'a Tensor<D>>,
    pub(crate) gamma: &'a Tensor<1>,
    pub(crate) beta: Option<&'a Tensor<1>>,
}

impl<const D: usize> NormalizationInputs<'_, D> {
    /// Returns whether the tensors agree in device, dtype and length of a row, and have rows.
    fn agree(&self) -> bool {
        let (device, dtype) = (self.input.device(), self.input.dtype());
        let len = self.input.dims()[D - 1];
        let param = |param: &Tensor<1>| {
            param.dims() == [len] && param.dtype() == dtype && param.device() == device
        };
        let residual = |residual: &&Tensor<D>| {
            residual.dims() == self.input.dims()
                && residual.dtype() == dtype
                && residual.device() == device
        };
        self.input.shape().num_elements() > 0
            && std::iter::once(self.gamma).chain(self.beta).all(param)
            && self.residual.iter().all(residual)
    }
}

/// Which tensors follow the input in a list: the residual, gamma and beta, in this order.
#[derive(Clone, Copy, Debug)]
struct Present {
    residual: bool,
    beta: bool,
}

/// Normalizes the rows of the last dimension, and records it for backward if a tensor is tracked. Also
/// returns the sum of input and residual, if there is a residual.
///
/// Returns `None` for devices without kernels, for dtypes that the kernels of the device do not take,
/// for tensors without elements, and if the tensors do not agree in device, dtype and shape.
pub(crate) fn normalize_tracked<const D: usize>(
    inputs: &NormalizationInputs<'_, D>,
    rule: NormalizationRule,
) -> Option<(Tensor<D>, Option<Tensor<D>>)> {
    if !inputs.agree() {
        return None;
    }
    let NormalizationInputs { input, residual, gamma, beta } = *inputs;
    let present = Present { residual: residual.is_some(), beta: beta.is_some() };
    let (device, dtype) = (input.device(), input.dtype());
    let results: Result<_, KernelError> = with_backend!(device, |B, inner| {
        check_dtype::<B>(&inner, dtype).and_then(|()| {
            let wide = [Some(input), residual].into_iter().flatten();
            let wide = wide.map(|tensor| tensor.clone().into_dispatch());
            let params = [Some(gamma), beta].into_iter().flatten();
            let params = params.map(|tensor| tensor.clone().into_dispatch());
            let taken = take_all::<B>(wide.chain(params));
            let results = taken.and_then(|tensors| apply::<B>(tensors, present, rule));
            let other = || KernelError::OtherDevice { device: format!("{device:?}") };
            let (output, sum) = results.ok_or_else(other)?;
            let give = |value| Tensor::from_dispatch(<B as ModelBackend>::into_dispatch(value));
            Ok((give(output), sum.map(give)))
        })
    });
    results.ok()
}

/// A result, and the sum of input and residual if there is a residual.
type Results<T> = (T, Option<T>);

/// Normalizes the first tensor by the others.
fn apply<B: ModelBackend>(
    tensors: Taken<B>,
    present: Present,
    rule: NormalizationRule,
) -> Option<Results<FloatTensor<B>>> {
    let (tensors, context) = match tensors {
        Taken::Plain(tensors) => {
            let Normalized { output, sum } = forward::<B>(tensors, present, rule);
            return Some((FloatTensor::Plain(output), sum.map(FloatTensor::Plain)));
        }
        Taken::Autodiff(tensors, context) => (tensors, context),
    };
    let (output, sum) = match (present.residual, present.beta) {
        (false, false) => (record::<B, 2>(tensors.try_into().ok()?, present, rule), None),
        (false, true) => (record::<B, 3>(tensors.try_into().ok()?, present, rule), None),
        (true, false) => record_with_sum::<B, 3>(tensors.try_into().ok()?, present, rule),
        (true, true) => record_with_sum::<B, 4>(tensors.try_into().ok()?, present, rule),
    };
    let autodiff = |tensor| FloatTensor::Autodiff(tensor, context);
    Some((autodiff(output), sum.map(autodiff)))
}

/// Normalizes the first tensor by the others without lowering them.
fn forward<B: ModelBackend>(
    tensors: Vec<Float<B>>,
    present: Present,
    rule: NormalizationRule,
) -> Normalized<Float<B>> {
    let result = (tensors[0].shape(), tensors[0].dtype());
    let results = vec![result; if present.residual { 2 } else { 1 }];
    let results = B::defer(tensors, results, move |buffers| {
        let mut buffers = buffers.into_iter();
        let mut next = || buffers.next().expect("`present` tells which tensors there are");
        let tensors = NormalizationTensors {
            input: next(),
            residual: present.residual.then(&mut next),
            gamma: next(),
            beta: present.beta.then(&mut next),
        };
        let Normalized { output, sum } = B::Raw::normalize(tensors, &rule);
        std::iter::once(output).chain(sum).collect()
    });
    let mut results = results.into_iter();
    let output = results.next().expect("`defer` returns one tensor for each output");
    Normalized { output, sum: results.next() }
}

/// Tensors that the gradients depend on.
///
/// Gamma is the tensor of the forward. If it is a view of a gather buffer, backward reads the
/// values that the buffer holds at that time.
#[derive(Clone, Debug)]
struct State<B: ModelBackend> {
    /// The rows that were normalized: the input, or its sum with the residual.
    input: Float<B>,
    gamma: Float<B>,
    present: Present,
    rule: NormalizationRule,
}

impl<B: ModelBackend> State<B> {
    /// Returns the gradients of the parents, in order, given those of the result and of the sum. Nothing
    /// is lowered.
    fn gradients(self, grad: Float<B>, sum_grad: Option<Float<B>>) -> Vec<Option<Float<B>>> {
        let Self { input, gamma, present, rule } = self;
        let dtype = input.dtype();
        let mut outputs: Vec<(Shape, DType)> = vec![(input.shape(), dtype)];
        outputs.resize(if rule.centered { 3 } else { 2 }, (gamma.shape(), dtype));
        let inputs = [input, gamma, grad].into_iter().chain(sum_grad).collect();
        let gradients = B::defer(inputs, outputs, move |buffers| {
            let mut buffers = buffers.into_iter();
            let mut next = || buffers.next().expect("input, gamma and gradient");
            let (input, gamma, grad) = (next(), next(), next());
            let tensors = NormalizationGrads { input, gamma, grad, sum_grad: buffers.next() };
            B::Raw::normalize_backward(tensors, &rule)
        });
        in_order_of_parents(gradients, present)
    }
}

/// Returns the gradients of the parents, given those of the input, gamma and beta: that of the residual
/// is that of the input.
fn in_order_of_parents<T: Clone>(gradients: Vec<T>, present: Present) -> Vec<Option<T>> {
    let residual = present.residual.then(|| gradients[0].clone());
    let mut gradients: Vec<Option<T>> = gradients.into_iter().map(Some).collect();
    if residual.is_some() {
        gradients.insert(1, residual);
    }
    gradients
}

/// Normalizes the first tensor by the others, and records it as one autodiff operation.
fn record<B: ModelBackend, const N: usize>(
    tensors: [Tracked<B>; N],
    present: Present,
    rule: NormalizationRule,
) -> Tracked<B> {
    let nodes = tensors.each_ref().map(|tensor| tensor.node());
    let values = Vec::from(tensors.map(Tracked::<B>::into_primitive));
    let (input, gamma) = (values[0].clone(), values[1].clone());
    let state = State { input, gamma, present, rule };
    let output = forward::<B>(values, present, rule).output;
    let op = Backward::<B, N>::prepare::<NoCheckpointing>(Normalize, nodes);
    match op.compute_bound().stateful() {
        OpsKind::Tracked(op) => op.finish(state, output),
        OpsKind::UnTracked(op) => op.finish(output),
    }
}

/// Normalizes the sum of the first two tensors by the others, and records it as one autodiff operation with
/// two results.
fn record_with_sum<B: ModelBackend, const N: usize>(
    tensors: [Tracked<B>; N],
    present: Present,
    rule: NormalizationRule,
) -> Results<Tracked<B>> {
    let nodes = tensors.each_ref().map(|tensor| tensor.node());
    let values = Vec::from(tensors.map(Tracked::<B>::into_primitive));
    let gamma = values[2].clone();
    let Normalized { output, sum } = forward::<B>(values, present, rule);
    let sum = sum.expect("a residual has a sum");
    let state = State { input: sum.clone(), gamma, present, rule };
    let [output, sum] = two_results::<B, _, N>(NormalizeSum, nodes, state, [output, sum]);
    (output, Some(sum))
}

/// Backward of a normalization. The parents are the input, gamma, and beta if there is one.
#[derive(Debug)]
struct Normalize;

impl<B: ModelBackend, const N: usize> Backward<B, N> for Normalize {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        register_gradients::<B, _, _, N>(ops, grads, |state, grad| state.gradients(grad, None));
    }
}

/// Backward of a normalization with a residual. The parents are the input, the residual, gamma, and beta
/// if there is one. The results are the normalized rows and the sum.
#[derive(Debug)]
struct NormalizeSum;

impl<B: ModelBackend> ResultGrads<B> for NormalizeSum {
    type State = State<B>;

    fn gradients(state: State<B>, grads: [Option<Float<B>>; 2]) -> Vec<Option<Float<B>>> {
        match grads {
            [Some(grad), sum_grad] => state.gradients(grad, sum_grad),
            // The normalized rows were not used, so that gamma and beta have no influence.
            [None, sum_grad] => {
                let zeros = || {
                    let (device, dtype) = (state.gamma.device(), state.gamma.dtype());
                    B::float_zeros(state.gamma.shape(), &device, dtype.into())
                };
                let params = if state.present.beta { 2 } else { 1 };
                let params = (0..params).map(|_| Some(zeros()));
                [sum_grad.clone(), sum_grad].into_iter().chain(params).collect()
            }
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::{DType, Device, Tensor};

    use super::*;
    use crate::backend::ops::softmax_tracked;

    fn tensor<const D: usize>(shape: [usize; D], dtype: DType) -> Tensor<D> {
        Tensor::zeros(shape, (&Device::flex(), dtype))
    }

    fn has_kernel(x: Tensor<2>, gamma: Tensor<1>, beta: Option<Tensor<1>>) -> bool {
        let residuals = [None, Some(x.clone())];
        let [alone, with_residual] = residuals.each_ref().map(|residual| {
            let (residual, beta) = (residual.as_ref(), beta.as_ref());
            let inputs = NormalizationInputs { input: &x, residual, gamma: &gamma, beta };
            let results =
                normalize_tracked(&inputs, NormalizationRule { centered: true, epsilon: 1e-5 });
            assert!(results.iter().all(|(_, sum)| sum.is_some() == residual.is_some()));
            results.is_some()
        });
        assert_eq!(alone, with_residual);
        alone
    }

    #[test]
    fn the_kernels_are_used_where_there_are_kernels() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let (x, row) = (tensor([2, 3], dtype), tensor([3], dtype));
            assert!(has_kernel(x.clone(), row.clone(), None));
            assert!(has_kernel(x.clone(), row.clone(), Some(row.clone())));
            let tracked = Tensor::from_inner(x);
            assert!(has_kernel(tracked, Tensor::from_inner(row), None));
        }
        let (x, row) = (tensor([2, 3], DType::F32), tensor([3], DType::F32));
        let [tracked, weight] =
            [Tensor::from_inner(x.clone()), Tensor::from_inner(row.clone().unsqueeze())];
        let weight = weight.squeeze_dim::<1>(0);
        assert!(softmax_tracked(&x).is_some() && softmax_tracked(&tracked).is_some());

        let (wide, other) = (tensor([2, 3], DType::F64), tensor([3], DType::F64));
        assert!(!has_kernel(wide, other.clone(), None), "f64");
        assert!(!has_kernel(x.clone(), other, None), "two dtypes");
        for dtype in [DType::F64, DType::F16, DType::BF16] {
            assert!(softmax_tracked(&tensor([2, 3], dtype)).is_none(), "{dtype:?}");
        }
        assert!(!has_kernel(x.clone(), weight.clone(), None), "a tracked parameter alone");
        assert!(!has_kernel(tracked, row.clone(), None), "a tracked input alone");
        assert!(!has_kernel(x, row.clone(), Some(weight)), "a tracked bias alone");
        assert!(!has_kernel(tensor([2, 4], DType::F32), row.clone(), None), "another length");
        assert!(!has_kernel(tensor([0, 3], DType::F32), row, None), "no rows");
        assert!(softmax_tracked(&tensor([2, 0], DType::F32)).is_none(), "no elements");
    }
}
