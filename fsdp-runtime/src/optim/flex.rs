//! A step on Flex: the tensors' own memory, written in place.

use burn::backend::flex::FlexTensor;
use burn::backend::{DispatchDevice, Flex, TensorMetadata};
use burn::optim::{AdaptiveMomentumState, LearningRate};
use burn::tensor::{DType, Shape, Tensor, TensorData};

use super::adam::Moments;
use super::kernel::{self, AdamStep, SgdStep};
use super::sgd::Sgd;
use crate::backend::ShardBackend;

/// Whether all of these are f32 on Flex.
pub(super) fn takes<'a, const D: usize>(tensors: impl IntoIterator<Item = &'a Tensor<D>>) -> bool {
    tensors.into_iter().all(|tensor| {
        tensor.dtype() == DType::F32
            && matches!(tensor.device().inner().as_dispatch(), DispatchDevice::Flex(_))
    })
}

/// Whether [`adam`] takes these.
pub(super) fn takes_adam<const D: usize>(
    param: &Tensor<D>,
    grad: &Tensor<D>,
    state: Option<&AdaptiveMomentumState<D>>,
) -> bool {
    let moments = |state: &'_ AdaptiveMomentumState<D>| {
        let max = state.max_moment_2.as_ref();
        takes([&state.moment_1, &state.moment_2].into_iter().chain(max))
    };
    takes([param, grad]) && state.is_none_or(moments)
}

/// One step of Adam or AdamW.
pub(super) fn adam<const D: usize>(
    rule: &Moments,
    lr: LearningRate,
    param: Tensor<D>,
    grad: Tensor<D>,
    state: Option<AdaptiveMomentumState<D>>,
) -> (Tensor<D>, AdaptiveMomentumState<D>) {
    let (mut param, grad) = (Elements::of(param), Elements::of(grad));
    let shape = param.shape();
    let (time, mut moment_1, mut moment_2, max) = match state {
        Some(AdaptiveMomentumState { time, moment_1, moment_2, max_moment_2 }) => {
            let state = |tensor| Elements::of_state(tensor, &shape);
            (time + 1, state(moment_1), state(moment_2), max_moment_2.map(state))
        }
        None => (1, Elements::zeros(&shape), Elements::zeros(&shape), None),
    };
    let mut max = rule.amsgrad.then(|| max.unwrap_or_else(|| Elements::zeros(&shape)));

    kernel::adam(
        &AdamStep::new(rule, lr, time),
        param.as_mut_slice(),
        grad.as_slice(),
        moment_1.as_mut_slice(),
        moment_2.as_mut_slice(),
        max.as_mut().map(Elements::as_mut_slice),
    );

    let mut state =
        AdaptiveMomentumState::new(time, moment_1.into_tensor(), moment_2.into_tensor());
    state.max_moment_2 = max.map(Elements::into_tensor);
    (param.into_tensor(), state)
}

/// One step of SGD, with the velocity it leaves.
pub(super) fn sgd<const D: usize>(
    rule: &Sgd,
    lr: LearningRate,
    param: Tensor<D>,
    grad: Tensor<D>,
    velocity: Option<Tensor<D>>,
) -> (Tensor<D>, Option<Tensor<D>>) {
    let (mut param, grad) = (Elements::of(param), Elements::of(grad));
    let shape = param.shape();
    let first = velocity.is_none();
    let mut velocity = rule.has_momentum().then(|| match velocity {
        Some(velocity) => Elements::of_state(velocity, &shape),
        None => Elements::zeros(&shape),
    });

    kernel::sgd(
        &SgdStep::new(rule, lr, first),
        param.as_mut_slice(),
        grad.as_slice(),
        velocity.as_mut().map(Elements::as_mut_slice),
    );
    (param.into_tensor(), velocity.map(Elements::into_tensor))
}

/// The elements of an f32 tensor on Flex, side by side.
struct Elements(FlexTensor);

impl Elements {
    /// The tensor itself, or a copy where it is not contiguous.
    fn of<const D: usize>(tensor: Tensor<D>) -> Self {
        let value = Flex::from_dispatch(tensor.into_dispatch()).expect("a tensor on Flex");
        let tensor = value.into_inner();
        Self(if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() })
    }

    /// As [`of`](Self::of), for part of an optimizer's state.
    ///
    /// # Panics
    ///
    /// If its shape is not the parameter's.
    fn of_state<const D: usize>(tensor: Tensor<D>, shape: &Shape) -> Self {
        let elements = Self::of(tensor);
        assert_eq!(
            &elements.shape(),
            shape,
            "the optimizer state of a parameter has another shape (left) than the parameter (right); \
             load a record that was saved for this model, sharded as it is now"
        );
        elements
    }

    fn zeros(shape: &Shape) -> Self {
        let zeros = vec![0f32; shape.num_elements()];
        Self(FlexTensor::from_data(TensorData::new(zeros, shape.clone())))
    }

    fn shape(&self) -> Shape {
        self.0.shape()
    }

    fn as_slice(&self) -> &[f32] {
        self.0.as_slice().expect("a contiguous f32 tensor")
    }

    /// The tensor's own memory where nothing shares it, else that of a copy, which replaces it.
    fn as_mut_slice(&mut self) -> &mut [f32] {
        if !self.0.is_unique() {
            let copy = self.as_slice().to_vec();
            self.0 = FlexTensor::from_data(TensorData::new(copy, self.shape()));
        }
        let (start, end) = self.0.layout().contiguous_offsets().expect("a contiguous tensor");
        &mut self.0.storage_mut::<f32>()[start..end]
    }

    fn into_tensor<const D: usize>(self) -> Tensor<D> {
        Tensor::from_dispatch(Flex::into_dispatch(crate::backend::Value::Plain(self.0)))
    }
}

#[cfg(test)]
mod tests {
    use burn::module::Module;
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::{GradientsParams, ModuleOptimizer, Optimizer};
    use burn::tensor::Device;

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
            let momentum = &left.as_ref().unwrap().momentum;
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
