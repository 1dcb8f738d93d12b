//! A step in one pass over memory, on the backends that have the kernels: in the tensors' own memory.

use burn::backend::TensorMetadata;
use burn::optim::{AdaptiveMomentumState, LearningRate};
use burn::tensor::{DType, Device, Shape, Tensor};

use super::adam::Moments;
use super::sgd::Sgd;
use crate::backend::kernels::{AdamTensors, Kernels, batched_steps, has_kernels};
use crate::backend::{Float, FloatTensor, ShardBackend, with_backend};
use crate::error::ShardError;

/// Whether all of these are f32 on one device with kernels.
pub(super) fn takes<'a, const D: usize>(tensors: impl IntoIterator<Item = &'a Tensor<D>>) -> bool {
    let mut first: Option<Device> = None;
    tensors.into_iter().all(|tensor| {
        let device = tensor.device().inner();
        tensor.dtype() == DType::F32
            && has_kernels(&device)
            && *first.get_or_insert_with(|| device.clone()) == device
    })
}

/// Whether [`adam`] takes these.
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

/// One step of Adam or AdamW on tensors that [`takes_adam`]; with `foreach`, possibly only at the end
/// of the [`batched_steps::scope`] around.
pub(super) fn adam<const D: usize>(
    rule: &Moments,
    lr: LearningRate,
    param: Tensor<D>,
    grad: Tensor<D>,
    state: Option<AdaptiveMomentumState<D>>,
    foreach: bool,
) -> (Tensor<D>, AdaptiveMomentumState<D>) {
    let stepped: Result<_, ShardError> = with_backend!(param.device(), |B, device| {
        let (param, grad) = (take::<B, D>(param), take::<B, D>(grad));
        let shape = param.shape();
        let zeros = || B::zeros(&device, shape.clone());
        let (time, moment_1, moment_2, max) = match state {
            Some(AdaptiveMomentumState { time, moment_1, moment_2, max_moment_2 }) => {
                let state = |tensor| take_state::<B, D>(tensor, &shape);
                (time + 1, state(moment_1), state(moment_2), max_moment_2.map(state))
            }
            None => (1, zeros(), zeros(), None),
        };
        let max = rule.amsgrad.then(|| max.unwrap_or_else(zeros));
        let tensors = AdamTensors { param, moment_1, moment_2, max };

        let later = foreach && batched_steps::is_open();
        let tensors = B::adam(&rule.step(lr, time), grad, tensors, later);

        let AdamTensors { param, moment_1, moment_2, max } = tensors.map(give::<B, D>);
        let mut state = AdaptiveMomentumState::new(time, moment_1, moment_2);
        state.max_moment_2 = max;
        Ok((param, state))
    });
    stepped.expect("`takes_adam` has asked for the device")
}

/// One step of SGD on tensors that it [`takes`], with the velocity it leaves; `foreach` as for [`adam`].
pub(super) fn sgd<const D: usize>(
    rule: &Sgd,
    lr: LearningRate,
    param: Tensor<D>,
    grad: Tensor<D>,
    velocity: Option<Tensor<D>>,
    foreach: bool,
) -> (Tensor<D>, Option<Tensor<D>>) {
    let stepped: Result<_, ShardError> = with_backend!(param.device(), |B, device| {
        let (param, grad) = (take::<B, D>(param), take::<B, D>(grad));
        let shape = param.shape();
        let first = velocity.is_none();
        let velocity = rule.has_momentum().then(|| match velocity {
            Some(velocity) => take_state::<B, D>(velocity, &shape),
            None => B::zeros(&device, shape),
        });
        let later = foreach && batched_steps::is_open();
        let step = rule.numbers(lr, first);
        let (param, velocity) = B::sgd(&step, grad, param, velocity, later);
        Ok((give::<B, D>(param), velocity.map(give::<B, D>)))
    });
    stepped.expect("`takes` has asked for the device")
}

fn take<B: ShardBackend, const D: usize>(tensor: Tensor<D>) -> Float<B> {
    let value = B::from_dispatch(tensor.into_dispatch());
    value.expect("`takes` has asked for the device").into_inner()
}

/// As [`take`], for part of an optimizer's state.
///
/// # Panics
///
/// If its shape is not the parameter's.
fn take_state<B: ShardBackend, const D: usize>(tensor: Tensor<D>, shape: &Shape) -> Float<B> {
    let tensor = take::<B, D>(tensor);
    assert_eq!(
        &tensor.shape(),
        shape,
        "the optimizer state of a parameter has another shape (left) than the parameter (right); \
         load a record that was saved for this model, sharded as it is now"
    );
    tensor
}

fn give<B: ShardBackend, const D: usize>(tensor: Float<B>) -> Tensor<D> {
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

    /// A bias's gradient is a broadcast view: read, never written.
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
            assert_ne!(linear.weight.val().into_data(), before.1, "and it has been updated");
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
    fn moments_stay_where_they_are() {
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

    /// A checkpoint's matrix read transposed is a view with the strides the other way round.
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
    fn the_training_state_of_a_parameter_survives() {
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
    fn the_state_of_another_sharding_is_refused() {
        let device = Device::flex();
        let adam = AdamWConfig::new().build();
        let ones = |rows| Tensor::<2>::ones([rows, 40], &device);
        let (_, state) = adam.step(1e-3, ones(30), ones(30), None);
        adam.step(1e-3, ones(15), ones(15), state);
    }

    #[test]
    fn other_number_types_are_left_to_burn() {
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
