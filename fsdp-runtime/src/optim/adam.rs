//! Adam and AdamW: the configs, and the choice between the fused step and Burn's operations.

use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::optim::{self, AdamState, AdamWState, LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor};

use super::on_host::OnHost;
use crate::backend::kernels::AdamStep;

/// What Adam and AdamW share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moments {
    pub(super) beta_1: f32,
    pub(super) beta_2: f32,
    pub(super) epsilon: f32,
    pub(crate) amsgrad: bool,
    pub(super) decay: Decay,
}

impl Moments {
    /// Step number `time`, counted from 1. As in PyTorch, all is computed in f64 and rounded once.
    pub(crate) fn step(&self, lr: f64, time: usize) -> AdamStep {
        let [beta_1, beta_2] = [self.beta_1, self.beta_2].map(f64::from);
        let time = i32::try_from(time).unwrap_or(i32::MAX);
        let correction = |beta: f64| 1.0 - beta.powi(time);
        let (penalty, rate, cautious) = match self.decay {
            Decay::Coupled { penalty } => (penalty, 0.0, false),
            Decay::Decoupled { rate, cautious } => (0.0, lr * f64::from(rate), cautious),
        };
        AdamStep {
            beta_1: self.beta_1,
            one_minus_beta_1: (1.0 - beta_1) as f32,
            beta_2: self.beta_2,
            one_minus_beta_2: (1.0 - beta_2) as f32,
            epsilon: self.epsilon,
            root_scale: correction(beta_2).sqrt().recip() as f32,
            step_size: (lr / correction(beta_1)) as f32,
            penalty,
            keep: (1.0 - rate) as f32,
            rate: rate as f32,
            cautious,
        }
    }
}

/// How weights decay.
#[derive(Clone, Copy, Debug)]
pub(super) enum Decay {
    /// Through the gradient.
    Coupled { penalty: f32 },
    /// Beside it; `cautious` only where it pulls the way the update goes.
    Decoupled { rate: f32, cautious: bool },
}

/// Configuration of [`AdamW`], with PyTorch's defaults. (Burn's own are ε = 1e-5 and a decay of 1e-4.)
#[derive(Config, Debug)]
pub struct AdamWConfig {
    /// β₁: what the first moment keeps of itself each step, in `[0, 1)`.
    #[config(default = 0.9)]
    beta_1: f32,
    /// β₂: what the second moment keeps of itself each step, in `[0, 1)`.
    #[config(default = 0.999)]
    beta_2: f32,
    /// ε, added to the denominator.
    #[config(default = 1e-8)]
    epsilon: f32,
    /// λ: the parameter shrinks by `lr · λ` of itself each step.
    #[config(default = 1e-2)]
    weight_decay: f32,
    /// Whether a parameter only decays where the first moment has its sign.
    ///
    /// [Cautious Weight Decay, 2025](https://arxiv.org/abs/2510.12402)
    #[config(default = false)]
    cautious_weight_decay: bool,
    /// Whether the denominator is the largest second moment so far.
    ///
    /// [On the Convergence of Adam and Beyond](https://openreview.net/forum?id=ryQu7f-RZ)
    #[config(default = false)]
    amsgrad: bool,
    /// Clipping of each parameter's gradient by itself. For all gradients together, and for a sharded
    /// model, use [`Fsdp::clip_grad_norm`](crate::Fsdp::clip_grad_norm).
    grad_clipping: Option<GradientClippingConfig>,
}

/// Adam with decoupled weight decay.
///
/// With gradient `g`, step `t` from 1 and learning rate `η`, for each element:
///
/// ```text
/// m ← β₁·m + (1 - β₁)·g
/// v ← β₂·v + (1 - β₂)·g²
/// θ ← (1 - η·λ)·θ - η/(1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵗ) + ε)
/// ```
///
/// Loshchilov and Hutter, [*Decoupled Weight Decay Regularization*](https://arxiv.org/abs/1711.05101),
/// 2019, algorithm 2, with the schedule in η as in
/// [PyTorch](https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html).
///
/// Its state is that of [`burn::optim::AdamW`]. It panics where a loaded state has not the shape of its
/// parameter.
#[derive(Clone)]
pub struct AdamW {
    pub(crate) rule: Moments,
    elsewhere: optim::AdamW,
    foreach: bool,
}

impl AdamWConfig {
    /// The optimizer of one parameter group, for
    /// [`ModuleOptimizer::with_group`](burn::optim::ModuleOptimizer::with_group); it does not clip.
    pub fn build(&self) -> AdamW {
        let elsewhere = optim::AdamWConfig::new()
            .with_beta_1(self.beta_1)
            .with_beta_2(self.beta_2)
            .with_epsilon(self.epsilon)
            .with_weight_decay(self.weight_decay)
            .with_cautious_weight_decay(self.cautious_weight_decay)
            .with_amsgrad(self.amsgrad);
        let rule = Moments {
            beta_1: self.beta_1,
            beta_2: self.beta_2,
            epsilon: self.epsilon,
            amsgrad: self.amsgrad,
            decay: Decay::Decoupled {
                rate: self.weight_decay,
                cautious: self.cautious_weight_decay,
            },
        };
        AdamW { rule, elsewhere: elsewhere.build(), foreach: false }
    }

    /// The optimizer of a module.
    pub fn init(&self) -> ModuleOptimizer {
        with_clipping(self.build().with_foreach(true).into(), self.grad_clipping.as_ref())
    }
}

impl AdamW {
    /// Whether steps on the parameters of a sharded model share launches on CubeCL devices, eight at a
    /// time, as with `foreach` in PyTorch; `init()` says so. For an optimizer that Burn's
    /// `ModuleOptimizer` calls itself: one that another optimizer calls, which goes on with what it
    /// returns, must not, as that may be computed only when all parameters have been stepped.
    pub fn with_foreach(mut self, foreach: bool) -> Self {
        self.foreach = foreach;
        self
    }
}

impl Optimizer for AdamW {
    type State<const D: usize> = OnHost<AdamWState<D>>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        if super::fused::takes_adam(
            &tensor,
            &grad,
            state.as_ref().map(|OnHost(state)| &state.momentum),
        ) {
            let state = state.map(|OnHost(state)| state.momentum);
            let (tensor, state) =
                super::fused::adam(&self.rule, lr, tensor, grad, state, self.foreach);
            return (tensor, Some(OnHost(AdamWState::new(state))));
        }
        let state = state.map(|OnHost(state)| state);
        let (tensor, state) = self.elsewhere.step(lr, tensor, grad, state);
        (tensor, state.map(OnHost))
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        OnHost(optim::AdamW::to_device(state.0, device))
    }
}

/// Configuration of [`Adam`], with PyTorch's defaults. (Burn's own ε is 1e-5.)
#[derive(Config, Debug)]
pub struct AdamConfig {
    /// β₁: what the first moment keeps of itself each step, in `[0, 1)`.
    #[config(default = 0.9)]
    beta_1: f32,
    /// β₂: what the second moment keeps of itself each step, in `[0, 1)`.
    #[config(default = 0.999)]
    beta_2: f32,
    /// ε, added to the denominator.
    #[config(default = 1e-8)]
    epsilon: f32,
    /// λ: `λ · θ` is added to the gradient (an L2 penalty).
    #[config(default = 0.0)]
    weight_decay: f32,
    /// Whether the denominator is the largest second moment so far.
    ///
    /// [On the Convergence of Adam and Beyond](https://openreview.net/forum?id=ryQu7f-RZ)
    #[config(default = false)]
    amsgrad: bool,
    /// Clipping of each parameter's gradient by itself. For all gradients together, and for a sharded
    /// model, use [`Fsdp::clip_grad_norm`](crate::Fsdp::clip_grad_norm).
    grad_clipping: Option<GradientClippingConfig>,
}

/// Adam, with an L2 penalty if asked: [`AdamW`] with `g ← g + λ·θ` in place of its decay.
///
/// Kingma and Ba, [*Adam: A Method for Stochastic Optimization*](https://arxiv.org/abs/1412.6980), 2015,
/// as in [PyTorch](https://docs.pytorch.org/docs/stable/generated/torch.optim.Adam.html).
///
/// Its state is that of [`burn::optim::Adam`]. It panics where a loaded state has not the shape of its
/// parameter.
#[derive(Clone)]
pub struct Adam {
    pub(crate) rule: Moments,
    elsewhere: optim::Adam,
    foreach: bool,
}

impl AdamConfig {
    /// The optimizer of one parameter group, for
    /// [`ModuleOptimizer::with_group`](burn::optim::ModuleOptimizer::with_group); it does not clip.
    pub fn build(&self) -> Adam {
        let decay = optim::decay::WeightDecayConfig::new(self.weight_decay);
        let elsewhere = optim::AdamConfig::new()
            .with_beta_1(self.beta_1)
            .with_beta_2(self.beta_2)
            .with_epsilon(self.epsilon)
            .with_weight_decay((self.weight_decay != 0.0).then_some(decay))
            .with_amsgrad(self.amsgrad);
        let rule = Moments {
            beta_1: self.beta_1,
            beta_2: self.beta_2,
            epsilon: self.epsilon,
            amsgrad: self.amsgrad,
            decay: Decay::Coupled { penalty: self.weight_decay },
        };
        Adam { rule, elsewhere: elsewhere.build(), foreach: false }
    }

    /// The optimizer of a module.
    pub fn init(&self) -> ModuleOptimizer {
        with_clipping(self.build().with_foreach(true).into(), self.grad_clipping.as_ref())
    }
}

impl Adam {
    /// As [`AdamW::with_foreach`].
    pub fn with_foreach(mut self, foreach: bool) -> Self {
        self.foreach = foreach;
        self
    }
}

impl Optimizer for Adam {
    type State<const D: usize> = OnHost<AdamState<D>>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        if super::fused::takes_adam(
            &tensor,
            &grad,
            state.as_ref().map(|OnHost(state)| &state.momentum),
        ) {
            let state = state.map(|OnHost(state)| state.momentum);
            let (tensor, state) =
                super::fused::adam(&self.rule, lr, tensor, grad, state, self.foreach);
            return (tensor, Some(OnHost(AdamState::new(state))));
        }
        let state = state.map(|OnHost(state)| state);
        let (tensor, state) = self.elsewhere.step(lr, tensor, grad, state);
        (tensor, state.map(OnHost))
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        OnHost(optim::Adam::to_device(state.0, device))
    }
}

/// A module's optimizer, with clipping if any.
pub(super) fn with_clipping(
    optimizer: ModuleOptimizer,
    clipping: Option<&GradientClippingConfig>,
) -> ModuleOptimizer {
    match clipping {
        Some(clipping) => optimizer.with_grad_clipping(clipping.init()),
        None => optimizer,
    }
}
