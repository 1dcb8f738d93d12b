//! Optimizer steps in one pass over memory, on backends with kernels. They update tensors in place.

use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::optim::{AdaptiveMomentumState, LearningRate};
use burn::tensor::{DType, Device, Shape, Tensor};
use fsdp_kernels::{
    AdamRule, AdamTensors, Kernels, SgdStep,
    batched_steps::{self, StepBatch},
    has_kernels,
};

use crate::backend::{Float, FloatTensor, ModelBackend, Raw, with_backend};
use crate::error::ShardError;

/// Returns whether all tensors are f32, on one device with kernels.
pub(super) fn takes<'a, const D: usize>(tensors: impl IntoIterator<Item = &'a Tensor<D>>) -> bool {
    let mut first: Option<Device> = None;
    tensors.into_iter().all(|tensor| {
        let device = tensor.device().inner();
        tensor.dtype() == DType::F32
            && has_kernels(&device)
            && *first.get_or_insert_with(|| device.clone()) == device
    })
}

/// Returns whether [`adam`] supports these tensors.
pub(super) fn takes_adam<const D: usize>(
    param: &Tensor<D>,
    grad: &Tensor<D>,
    state: Option<&AdaptiveMomentumState<D>>,
) -> bool {
    let state = state.into_iter().flat_map(|state| {
        [&state.moment_1, &state.moment_2].into_iter().chain(state.max_moment_2.as_ref())
    });
    takes([param, grad].into_iter().chain(state))
}

/// Runs one step of Adam or AdamW on tensors that [`takes_adam`] accepts. Returns the parameter and
/// the state.
///
/// With `foreach`, the step may run as late as the end of the enclosing [`batched_steps::scope`].
pub(super) fn adam<const D: usize>(
    rule: &AdamRule,
    lr: LearningRate,
    param: Tensor<D>,
    grad: Tensor<D>,
    state: Option<AdaptiveMomentumState<D>>,
    foreach: bool,
) -> (Tensor<D>, AdaptiveMomentumState<D>) {
    let stepped: Result<_, ShardError> = with_backend!(param.device(), |B, device| {
        let (param, grad) = (to_backend::<B, D>(param), to_backend::<B, D>(grad));
        let shape = param.shape();
        let zeros = || zeros::<B>(&device, &shape);
        let (time, moment_1, moment_2, max) = match state {
            Some(AdaptiveMomentumState { time, moment_1, moment_2, max_moment_2 }) => {
                let state = |tensor| state_to_backend::<B, D>(tensor, &shape);
                (time + 1, state(moment_1), state(moment_2), max_moment_2.map(state))
            }
            None => (1, zeros(), zeros(), None),
        };
        let max = rule.amsgrad.then(|| max.unwrap_or_else(zeros));
        let inputs = [grad, param, moment_1, moment_2].into_iter().chain(max).collect();
        let (step, batch) = (rule.step(lr, time), open_batch::<B>(foreach, &device));
        let outputs = vec![(shape.clone(), DType::F32); if rule.amsgrad { 4 } else { 3 }];
        let updated = B::defer(inputs, outputs, move |buffers| {
            let mut buffers = buffers.into_iter();
            let mut next = || buffers.next().expect("`defer` passes every input");
            let (grad, param, moment_1, moment_2) = (next(), next(), next(), next());
            let tensors = AdamTensors { param, moment_1, moment_2, max: buffers.next() };
            Raw::<B>::adam(&step, grad, tensors, batch.as_deref()).into_vec()
        });
        let mut updated = updated.into_iter().map(to_burn::<B, D>);
        let mut next = || updated.next().expect("`defer` returns every output");
        let (param, moment_1, moment_2) = (next(), next(), next());
        let max = updated.next();
        let mut state = AdaptiveMomentumState::new(time, moment_1, moment_2);
        state.max_moment_2 = max;
        Ok((param, state))
    });
    stepped.expect("`takes_adam` has checked the device")
}

/// Runs one step of SGD on tensors that [`takes`] accepts. Returns the parameter, and with
/// `momentum` the velocity.
///
/// With `foreach`, the step may run as late as the end of the enclosing [`batched_steps::scope`].
pub(super) fn sgd<const D: usize>(
    step: &SgdStep,
    momentum: bool,
    param: Tensor<D>,
    grad: Tensor<D>,
    velocity: Option<Tensor<D>>,
    foreach: bool,
) -> (Tensor<D>, Option<Tensor<D>>) {
    let stepped: Result<_, ShardError> = with_backend!(param.device(), |B, device| {
        let (param, grad) = (to_backend::<B, D>(param), to_backend::<B, D>(grad));
        let shape = param.shape();
        let velocity = momentum.then(|| match velocity {
            Some(velocity) => state_to_backend::<B, D>(velocity, &shape),
            None => zeros::<B>(&device, &shape),
        });
        let inputs = [grad, param].into_iter().chain(velocity).collect();
        let (step, batch) = (*step, open_batch::<B>(foreach, &device));
        let outputs = vec![(shape, DType::F32); if momentum { 2 } else { 1 }];
        let updated = B::defer(inputs, outputs, move |buffers| {
            let mut buffers = buffers.into_iter();
            let mut next = || buffers.next().expect("`defer` passes every input");
            let (grad, param) = (next(), next());
            let (param, velocity) =
                Raw::<B>::sgd(&step, grad, param, buffers.next(), batch.as_deref());
            [param].into_iter().chain(velocity).collect()
        });
        let mut updated = updated.into_iter().map(to_burn::<B, D>);
        let param = updated.next().expect("`defer` returns every output");
        Ok((param, updated.next()))
    });
    stepped.expect("`takes` has checked the device")
}

/// Returns a new f32 tensor of zeros.
fn zeros<B: ModelBackend>(device: &B::Device, shape: &Shape) -> Float<B> {
    B::raise(Raw::<B>::zeros(device, shape.clone()))
}

/// Returns the batch to defer a step to, if steps may be deferred.
fn open_batch<B: ModelBackend>(foreach: bool, device: &B::Device) -> Option<Arc<StepBatch>> {
    let batch = batched_steps::open().filter(|_| foreach)?;
    if B::RECORDS {
        let drained = device.clone();
        batch.drain_first(format!("{device:?}"), move || B::drain(&drained));
    }
    Some(batch)
}

/// Converts a Burn tensor on a device with kernels to the backend's tensor.
fn to_backend<B: ModelBackend, const D: usize>(tensor: Tensor<D>) -> Float<B> {
    let value = B::from_dispatch(tensor.into_dispatch());
    value.expect("`takes` has checked the device").into_inner()
}

/// Converts a part of an optimizer's state to the backend's tensor.
///
/// # Panics
///
/// Panics if the state has another shape than the parameter.
fn state_to_backend<B: ModelBackend, const D: usize>(tensor: Tensor<D>, shape: &Shape) -> Float<B> {
    let tensor = to_backend::<B, D>(tensor);
    assert_eq!(
        &tensor.shape(),
        shape,
        "the optimizer state of a parameter has another shape (left) than the parameter (right); \
         load a record that was saved for this model, sharded as it is now"
    );
    tensor
}

/// Converts a backend's tensor to a Burn tensor without autodiff.
fn to_burn<B: ModelBackend, const D: usize>(tensor: Float<B>) -> Tensor<D> {
    Tensor::from_dispatch(B::into_dispatch(FloatTensor::Plain(tensor)))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::backend::Flex;
    use burn::module::Module;
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::{GradientsParams, ModuleOptimizer, Optimizer};
    use burn::tensor::TensorData;

    use super::*;
    use crate::optim::{AdamConfig, AdamWConfig, SgdConfig};

    fn address<const D: usize>(tensor: &Tensor<D>) -> usize {
        let value = Flex::from_dispatch(tensor.clone().into_dispatch()).unwrap();
        value.into_inner().bytes().as_ptr().addr()
    }

    fn addresses(linear: &Linear) -> [usize; 2] {
        [address(&linear.weight.base()), address(&linear.bias.as_ref().unwrap().base())]
    }

    fn step(optimizer: &mut ModuleOptimizer, linear: Linear) -> Linear {
        let input = Tensor::<2>::ones([3, 40], &linear.weight.device());
        let loss = linear.forward(input).powf_scalar(2.0).mean();
        let grads = GradientsParams::from_grads(loss.backward(), &linear);
        optimizer.step(1e-2, linear, grads)
    }

    /// The gradient of a bias is a broadcast view, which a step reads and never writes.
    #[test]
    fn a_module_is_updated_in_its_own_memory() {
        let optimizers: [ModuleOptimizer; 3] = [
            AdamWConfig::new().with_amsgrad(true).init(),
            AdamConfig::new().with_weight_decay(0.1).init(),
            SgdConfig::new().with_momentum(0.9).init(),
        ];
        for mut optimizer in optimizers {
            let mut linear = LinearConfig::new(40, 30).init(&Device::flex().autodiff());
            let before = (addresses(&linear), linear.weight.val().into_data());
            for _ in 0..3 {
                linear = step(&mut optimizer, linear);
            }
            assert_eq!(addresses(&linear), before.0);
            assert_ne!(linear.weight.val().into_data(), before.1, "the step updates the parameter");
        }
    }

    #[test]
    fn a_clone_of_the_module_keeps_its_values() {
        let device = Device::flex().autodiff();
        let mut optimizer = AdamWConfig::new().init();
        let linear: Linear = LinearConfig::new(40, 30).init(&device);
        let (kept, values) = (linear.clone(), linear.weight.val().into_data());
        let linear = step(&mut optimizer, linear);
        assert_eq!(kept.weight.val().into_data(), values);
        assert_ne!(linear.weight.val().into_data(), values);
    }

    #[test]
    fn moments_are_updated_in_place() {
        let device = Device::flex();
        let adam = AdamWConfig::new().with_amsgrad(true).build();
        let mut param = Tensor::<2>::ones([30, 40], &device);
        let mut state = None;
        let mut seen = Vec::new();
        for _ in 0..3 {
            let grad = param.clone() * 2.0;
            let (next, left) = adam.step(1e-3, param, grad, state);
            let momentum = &left.as_ref().unwrap().0.momentum;
            let max = momentum.max_moment_2.as_ref().unwrap();
            seen.push([&next, &momentum.moment_1, &momentum.moment_2, max].map(address));
            (param, state) = (next, left);
        }
        assert_eq!(seen[0], seen[1]);
        assert_eq!(seen[0], seen[2]);
    }

    /// A transposed matrix, as loaded from a checkpoint, is a view with exchanged strides.
    #[test]
    fn a_transposed_parameter_is_updated_like_its_copy() {
        let device = Device::flex();
        let values: Vec<f32> = (0..1200).map(|i| (i as f32 * 0.37).sin()).collect();
        let flat = Tensor::<2>::from_data(TensorData::new(values, [40, 30]), &device);
        let view = flat.transpose();
        let copy = Tensor::<2>::from_data(view.to_data(), &device);
        let adam = AdamConfig::new().build();
        let grad = view.clone() * view.clone();
        let [a, b] = [view, copy].map(|param| adam.step(1e-2, param, grad.clone(), None).0);
        assert_eq!(a.into_data(), b.into_data());
    }

    #[test]
    fn a_step_keeps_id_and_requires_grad() {
        let device = Device::flex().autodiff();
        let linear: Linear = LinearConfig::new(40, 30).init(&device);
        let id = linear.weight.id;
        let linear = step(&mut SgdConfig::new().init(), linear);
        assert!(linear.weight.is_require_grad());
        assert_eq!(linear.weight.id, id);
        let frozen = linear.no_grad();
        let before = frozen.weight.val().into_data();
        let frozen = step_without_gradients(frozen);
        assert_eq!(frozen.weight.val().into_data(), before);
    }

    fn step_without_gradients(linear: Linear) -> Linear {
        SgdConfig::new().init().step(1.0, linear, GradientsParams::new())
    }

    #[test]
    #[should_panic(expected = "another shape")]
    fn state_of_another_shape_panics() {
        let device = Device::flex();
        let adam = AdamWConfig::new().build();
        let ones = |rows| Tensor::<2>::ones([rows, 40], &device);
        let (_, state) = adam.step(1e-3, ones(30), ones(30), None);
        adam.step(1e-3, ones(15), ones(15), state);
    }

    #[test]
    fn other_dtypes_are_stepped_by_burns_operations() {
        let device = Device::flex();
        let half = |value: f32| {
            Tensor::<1>::from_data([value; 5], &device).cast(burn::tensor::FloatDType::F16)
        };
        assert!(!takes([&half(1.0)]));
        let (param, _) = AdamWConfig::new().build().step(1e-1, half(1.0), half(0.5), None);
        assert_eq!(param.dtype(), DType::F16);
        let (param, _) = SgdConfig::new().build().step(1e-1, param, half(0.5), None);
        let values: Vec<f32> = param.into_data().iter::<f32>().collect();
        assert!(values.iter().all(|value| (value - 0.849).abs() < 2e-3), "{values:?}");
    }
}
