//! Adadelta: the config, the state, and the step.

use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{Device, Tensor};

use super::clipping::with_clipping;
use super::state_bytes::bytes;
use crate::param_group::memory::report;

/// Configuration of [`Adadelta`], with PyTorch's defaults. PyTorch's default learning rate is 1.
#[derive(Config, Debug)]
pub struct AdadeltaConfig {
    /// ρ, the decay rate of both averages, in `[0, 1]`. Default: 0.9.
    #[config(default = 0.9)]
    rho: f64,
    /// ε, added under both roots. Default: 1e-6.
    #[config(default = 1e-6)]
    epsilon: f64,
    /// λ, the L2 penalty: `λ · θ` is added to the gradient. Default: 0.
    #[config(default = 0.0)]
    weight_decay: f64,
    /// Clipping of each parameter's gradient separately. Default: none.
    ///
    /// To clip all gradients together, and for a sharded model, use
    /// [`Fsdp::clip_grad_norm`](crate::Fsdp::clip_grad_norm).
    grad_clipping: Option<GradientClippingConfig>,
}

/// Adadelta, whose step sizes follow the size of earlier steps.
///
/// With gradient `g` and learning rate `η`, for each element:
///
/// ```text
/// g ← g + λ·θ
/// v ← ρ·v + (1 - ρ)·g²
/// Δ ← √(u + ε) / √(v + ε) · g
/// u ← ρ·u + (1 - ρ)·Δ²
/// θ ← θ - η·Δ
/// ```
///
/// Zeiler, [*ADADELTA: An Adaptive Learning Rate Method*](https://arxiv.org/abs/1212.5701), 2012,
/// algorithm 1, with the learning rate and the penalty of
/// [PyTorch](https://docs.pytorch.org/docs/stable/generated/torch.optim.Adadelta.html). Burn has no
/// such optimizer.
///
/// The step runs as tensor operations, which allocate temporary tensors of the shard's size. They
/// are element-wise, so sharding a parameter does not change a bit of its update on Flex.
///
/// # Panics
///
/// A step panics if a loaded state has another shape than its parameter.
#[derive(Clone, Debug)]
pub struct Adadelta {
    rho: f64,
    epsilon: f64,
    weight_decay: f64,
}

/// The state of [`Adadelta`], under PyTorch's names. Both tensors have the shape of the parameter.
#[derive(Clone, Debug)]
pub struct AdadeltaState<const D: usize> {
    /// `v`, the running average of squared gradients.
    pub square_avg: Tensor<D>,
    /// `u`, the running average of squared updates.
    pub acc_delta: Tensor<D>,
}

/// Names of the state's tensors in a record.
const SQUARE_AVG: &str = "square_avg";
const ACC_DELTA: &str = "acc_delta";

impl<const D: usize> RecordState for AdadeltaState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_tensor(prefix, SQUARE_AVG, self.square_avg.clone().into_data());
        out.push_tensor(prefix, ACC_DELTA, self.acc_delta.clone().into_data());
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let device = crate::backend::host_device(device);
        let square_avg = src.take_tensor(prefix, SQUARE_AVG)?;
        let acc_delta = src.take_tensor(prefix, ACC_DELTA)?;
        Some(Self {
            square_avg: Tensor::from_data(square_avg, &device),
            acc_delta: Tensor::from_data(acc_delta, &device),
        })
    }
}

impl AdadeltaConfig {
    /// Returns the optimizer of one parameter group, for
    /// [`ModuleOptimizer::with_group`](burn::optim::ModuleOptimizer::with_group). It ignores
    /// `grad_clipping`.
    pub fn build(&self) -> Adadelta {
        let Self { rho, epsilon, weight_decay, .. } = *self;
        Adadelta { rho, epsilon, weight_decay }
    }

    /// Returns the optimizer of a module.
    pub fn init(&self) -> ModuleOptimizer {
        with_clipping(self.build().into(), self.grad_clipping.as_ref())
    }
}

impl Optimizer for Adadelta {
    type State<const D: usize> = AdadeltaState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        mut grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        report(2 * bytes(&tensor));
        let zeros =
            || AdadeltaState { square_avg: grad.zeros_like(), acc_delta: grad.zeros_like() };
        let AdadeltaState { square_avg, acc_delta } = state.unwrap_or_else(zeros);
        assert_eq!(
            square_avg.dims(),
            tensor.dims(),
            "the optimizer state of a parameter has another shape (left) than the parameter \
             (right); load a record that was saved for this model, sharded as it is now"
        );
        if self.weight_decay != 0.0 {
            grad = grad + tensor.clone() * self.weight_decay;
        }
        let square_avg = self.average(square_avg, &grad);
        let root = |average: &Tensor<D>| (average.clone() + self.epsilon).sqrt();
        let delta = root(&acc_delta) / root(&square_avg) * grad;
        let acc_delta = self.average(acc_delta, &delta);
        (tensor - delta * lr, Some(AdadeltaState { square_avg, acc_delta }))
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        AdadeltaState {
            square_avg: state.square_avg.to_device(device),
            acc_delta: state.acc_delta.to_device(device),
        }
    }
}

impl Adadelta {
    /// Adds squares to their running average.
    fn average<const D: usize>(&self, average: Tensor<D>, value: &Tensor<D>) -> Tensor<D> {
        average * self.rho + value.clone() * value.clone() * (1.0 - self.rho)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::TensorData;

    use super::*;

    fn tensor(values: &[f32]) -> Tensor<1> {
        Tensor::from_data(TensorData::new(values.to_vec(), [values.len()]), &Device::flex())
    }

    fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
        tensor.clone().into_data().try_into_vec_as().unwrap()
    }

    #[track_caller]
    fn assert_close(found: &Tensor<1>, expected: f64) {
        let found = f64::from(values(found)[0]);
        assert!((found - expected).abs() <= 1e-6 * expected.abs(), "{found} is not {expected}");
    }

    /// The numbers are those of PyTorch's documented algorithm with its defaults, computed by hand
    /// in f64. The first line: v = 0.1·0.5², Δ = √1e-6 / √(0.025 + 1e-6) · 0.5, u = 0.1·Δ².
    #[test]
    fn three_steps_have_pytorchs_numbers() {
        let adadelta = AdadeltaConfig::new().build();
        let (mut param, mut state) = (tensor(&[1.0]), None);
        for (grad, expected, square_avg, acc_delta) in [
            (0.5, 0.9968377855834876, 0.025, 9.99960001599936e-7),
            (-0.25, 0.9989228726112789, 0.02875, 1.3347227927863166e-6),
            (2.0, 0.9942400676040739, 0.425875, 3.3941167870580296e-6),
        ] {
            (param, state) = adadelta.step(1.0, param, tensor(&[grad]), state);
            let state = state.as_ref().unwrap();
            assert_close(&param, expected);
            assert_close(&state.square_avg, square_avg);
            assert_close(&state.acc_delta, acc_delta);
        }
    }

    #[test]
    fn penalty_and_learning_rate_are_pytorchs() {
        let (rho, epsilon, decay, lr) = (0.8, 1e-4, 0.1, 0.5);
        let config = AdadeltaConfig::new().with_rho(rho).with_epsilon(epsilon);
        let adadelta = config.with_weight_decay(decay).build();
        let (mut param, mut state) = (tensor(&[-0.7]), None);
        let (mut theta, mut v, mut u) = (-0.7f64, 0.0f64, 0.0f64);
        for step in 1..20 {
            let grad = (f64::from(step) * 0.7).sin() as f32;
            (param, state) = adadelta.step(lr, param, tensor(&[grad]), state);
            let g = f64::from(grad) + decay * theta;
            v = rho * v + (1.0 - rho) * g * g;
            let delta = (u + epsilon).sqrt() / (v + epsilon).sqrt() * g;
            u = rho * u + (1.0 - rho) * delta * delta;
            theta -= lr * delta;
            let found = f64::from(values(&param)[0]);
            assert!((found - theta).abs() < 1e-5, "step {step}: {found} is not {theta}");
        }
        assert!((theta + 0.7).abs() > 1e-3, "the parameter moves: {theta}");
    }

    /// Lengths that leave remainders at every vector width.
    #[test]
    fn a_part_of_a_tensor_is_stepped_to_the_same_bits() {
        let wave = |scale: f32| (0..1003).map(|i| (i as f32 * scale).sin()).collect::<Vec<_>>();
        let adadelta = AdadeltaConfig::new().with_weight_decay(0.01).build();
        let run = |range: std::ops::Range<usize>| {
            let (mut param, mut state) = (tensor(&wave(0.7)[range.clone()]), None);
            for step in 1..6 {
                let grad = tensor(&wave(0.3 * step as f32)[range.clone()]);
                (param, state) = adadelta.step(1.0, param, grad, state);
            }
            let state = state.unwrap();
            [values(&param), values(&state.square_avg), values(&state.acc_delta)]
        };
        let whole = run(0..1003);
        for range in [0..502, 502..1003, 3..4, 17..1000] {
            let part = run(range.clone());
            let cut = whole.each_ref().map(|values| values[range.clone()].to_vec());
            assert_eq!(part, cut, "{range:?}");
        }
    }

    #[test]
    fn state_is_read_back_from_a_record() {
        let adadelta = AdadeltaConfig::new().build();
        let (_, state) = adadelta.step(1.0, tensor(&[1.0, 2.0]), tensor(&[0.5, -3.0]), None);
        let state = state.unwrap();
        let mut sink = StateSink::default();
        state.state_flatten("p", &mut sink);
        assert_eq!((sink.tensors.len(), sink.scalars.len()), (2, 0));
        let mut source = StateSource::new(sink.scalars.into_iter().collect());
        sink.tensors.into_iter().for_each(|(name, data)| source.insert_tensor(name, data));
        let read = AdadeltaState::<1>::state_unflatten("p", &mut source, &Device::flex()).unwrap();
        assert_eq!(values(&read.square_avg), values(&state.square_avg));
        assert_eq!(values(&read.acc_delta), values(&state.acc_delta));
        assert_ne!(values(&read.acc_delta), values(&read.square_avg));
    }

    #[test]
    #[should_panic(expected = "another shape")]
    fn state_of_another_shape_panics() {
        let adadelta = AdadeltaConfig::new().build();
        let (_, state) = adadelta.step(1.0, tensor(&[1.0]), tensor(&[1.0]), None);
        adadelta.step(1.0, tensor(&[1.0, 2.0]), tensor(&[1.0, 2.0]), state);
    }
}
