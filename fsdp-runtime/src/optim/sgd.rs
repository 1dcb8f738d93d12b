//! Stochastic gradient descent with momentum: the config, the state, and the step as tensor
//! operations for tensors that no kernel takes.

use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{Device, Tensor};
use fsdp_kernels::SgdStep;

use super::clipping::with_clipping;
use super::fused;
use super::state_bytes::bytes;
use crate::backend::host_device;
use crate::param_group::memory::report;

/// Configuration of [`Sgd`], with PyTorch's defaults: no momentum, no decay.
#[derive(Config, Debug)]
pub struct SgdConfig {
    /// μ, the decay rate of the velocity. Default: 0, which is no momentum.
    #[config(default = 0.0)]
    momentum: f64,
    /// τ, the share of the gradient that is not added to the velocity, from the second step on.
    /// Default: 0.
    #[config(default = 0.0)]
    dampening: f64,
    /// Whether to use Nesterov momentum. Default: off.
    #[config(default = false)]
    nesterov: bool,
    /// λ, the L2 penalty: `λ · θ` is added to the gradient. Default: 0.
    #[config(default = 0.0)]
    weight_decay: f32,
    /// Clipping of each parameter's gradient separately. Default: none.
    ///
    /// To clip all gradients together, and for a sharded model, use
    /// [`Fsdp::clip_grad_norm`](crate::Fsdp::clip_grad_norm).
    grad_clipping: Option<GradientClippingConfig>,
}

/// Stochastic gradient descent, with momentum and weight decay if they are set.
///
/// With gradient `g` and learning rate `η`, for each element:
///
/// ```text
/// g ← g + λ·θ
/// b ← μ·b + (1 - τ)·g        (b ← g in the first step)
/// θ ← θ - η·b                (Nesterov: θ ← θ - η·(g + μ·b); without momentum: θ ← θ - η·g)
/// ```
///
/// Sutskever et al., [*On the importance of initialization and momentum in deep
/// learning*](http://www.cs.toronto.edu/~hinton/absps/momentum.pdf), 2013, in the form of
/// [PyTorch](https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html), which Burn
/// shares.
///
/// # Panics
///
/// A step panics if a loaded state has another shape than its parameter.
#[derive(Clone, Debug)]
pub struct Sgd {
    momentum: f64,
    dampening: f64,
    nesterov: bool,
    weight_decay: f32,
    foreach: bool,
}

/// The state of [`Sgd`]. Records name it as they name [`burn::optim::SgdState`].
#[derive(Clone, Debug)]
pub struct SgdState<const D: usize> {
    /// The velocity `b`, in the shape of the parameter; `None` without momentum.
    pub velocity: Option<Tensor<D>>,
}

/// Name of the velocity in a record.
const VELOCITY: &str = "momentum.velocity";

impl<const D: usize> RecordState for SgdState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        if let Some(velocity) = &self.velocity {
            out.push_tensor(prefix, VELOCITY, velocity.clone().into_data());
        }
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let velocity = src.take_tensor(prefix, VELOCITY);
        let device = host_device(device);
        Some(Self { velocity: velocity.map(|velocity| Tensor::from_data(velocity, &device)) })
    }
}

impl SgdConfig {
    /// Returns the optimizer of one parameter group, for
    /// [`ModuleOptimizer::with_group`](burn::optim::ModuleOptimizer::with_group). It ignores
    /// `grad_clipping`.
    pub fn build(&self) -> Sgd {
        Sgd {
            momentum: self.momentum,
            dampening: self.dampening,
            nesterov: self.nesterov,
            weight_decay: self.weight_decay,
            foreach: false,
        }
    }

    /// Returns the optimizer of a module, with `foreach`.
    pub fn init(&self) -> ModuleOptimizer {
        with_clipping(self.build().with_foreach(true).into(), self.grad_clipping.as_ref())
    }
}

impl Sgd {
    /// Sets whether steps of several parameters share a kernel launch:
    /// see [`AdamW::with_foreach`](super::AdamW::with_foreach).
    pub fn with_foreach(mut self, foreach: bool) -> Self {
        self.foreach = foreach;
        self
    }

    /// Returns the coefficients of one step. `first` says that the parameter has no velocity yet.
    pub(crate) fn numbers(&self, lr: f64, first: bool) -> SgdStep {
        SgdStep {
            lr: lr as f32,
            penalty: self.weight_decay,
            momentum: self.momentum as f32,
            grad_factor: if first { 1.0 } else { (1.0 - self.dampening) as f32 },
            nesterov: self.nesterov,
        }
    }

    /// Returns whether the state has a velocity.
    pub(crate) fn has_momentum(&self) -> bool {
        self.momentum != 0.0
    }

    /// Runs the step as tensor operations. Returns the parameter and the velocity.
    fn step_by_operations<const D: usize>(
        &self,
        lr: LearningRate,
        param: Tensor<D>,
        mut grad: Tensor<D>,
        velocity: Option<Tensor<D>>,
    ) -> (Tensor<D>, Option<Tensor<D>>) {
        if self.weight_decay != 0.0 {
            grad = grad + param.clone() * self.weight_decay;
        }
        if !self.has_momentum() {
            return (param - grad * lr, None);
        }
        let velocity = match velocity {
            Some(velocity) => velocity * self.momentum + grad.clone() * (1.0 - self.dampening),
            None => grad.clone(),
        };
        let update =
            if self.nesterov { grad + velocity.clone() * self.momentum } else { velocity.clone() };
        (param - update * lr, Some(velocity))
    }
}

impl Optimizer for Sgd {
    type State<const D: usize> = SgdState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let velocity = state.and_then(|state| state.velocity);
        report(if self.has_momentum() { bytes(&tensor) } else { 0 });
        if fused::takes([&tensor, &grad].into_iter().chain(&velocity)) {
            let (step, momentum) = (self.numbers(lr, velocity.is_none()), self.has_momentum());
            let (tensor, velocity) =
                fused::sgd(&step, momentum, tensor, grad, velocity, self.foreach);
            return (tensor, Some(SgdState { velocity }));
        }
        let (tensor, velocity) = self.step_by_operations(lr, tensor, grad, velocity);
        (tensor, Some(SgdState { velocity }))
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        SgdState { velocity: state.velocity.map(|velocity| velocity.to_device(device)) }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::TensorData;

    use super::*;

    #[test]
    fn tensor_operations_and_the_fused_step_give_the_same_numbers() {
        let device = Device::flex();
        let wave = |scale: f32| {
            let elements: Vec<f32> = (0..101).map(|i| (i as f32 * scale).sin()).collect();
            Tensor::<1>::from_data(TensorData::new(elements, [101]), &device)
        };
        let plain = SgdConfig::new().with_weight_decay(0.1);
        let momentum = plain.clone().with_momentum(0.9).with_dampening(0.2);
        let nesterov = momentum.clone().with_nesterov(true);
        for sgd in [plain, momentum, nesterov].map(|config| config.build()) {
            let (mut a, mut b) = (wave(0.7), wave(0.7));
            let (mut state, mut velocity) = (None, None);
            for step in 1..10 {
                let grad = wave(0.3 * step as f32);
                (a, state) = sgd.step(1e-2, a, grad.clone(), state);
                (b, velocity) = sgd.step_by_operations(1e-2, b, grad, velocity);
            }
            let difference = (a - b).abs().max().into_scalar::<f32>();
            assert!(difference < 1e-6, "{sgd:?}: {difference}");
            assert_eq!(velocity.is_some(), sgd.has_momentum());
        }
    }
}
