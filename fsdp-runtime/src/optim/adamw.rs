//! AdamW: Adam with decoupled weight decay.

use std::fmt;

use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::optim::{self, AdamWState, LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor};
use fsdp_kernels::{AdamRule, Decay};

use super::clipping::with_clipping;
use super::fused_adam::FusedAdam;
use super::on_host::OnHost;

/// Configuration of [`AdamW`], with PyTorch's defaults. (Burn's defaults are ε = 1e-5 and a weight
/// decay of 1e-4.)
#[derive(Config, Debug)]
pub struct AdamWConfig {
    /// β₁, the decay rate of the first moment, in `[0, 1)`. Default: 0.9.
    #[config(default = 0.9)]
    beta_1: f32,
    /// β₂, the decay rate of the second moment, in `[0, 1)`. Default: 0.999.
    #[config(default = 0.999)]
    beta_2: f32,
    /// ε, added to the denominator. Default: 1e-8.
    #[config(default = 1e-8)]
    epsilon: f32,
    /// λ, the weight decay: each step shrinks the parameter by `lr · λ` of its value. Default:
    /// 1e-2.
    #[config(default = 1e-2)]
    weight_decay: f32,
    /// Whether weight decay applies only to elements with the sign of the first moment. Default:
    /// off.
    ///
    /// [Cautious Weight Decay, 2025](https://arxiv.org/abs/2510.12402)
    #[config(default = false)]
    cautious_weight_decay: bool,
    /// Whether the denominator uses the largest second moment so far (AMSGrad). Default: off.
    ///
    /// [On the Convergence of Adam and Beyond](https://openreview.net/forum?id=ryQu7f-RZ)
    #[config(default = false)]
    amsgrad: bool,
    /// Clipping of each parameter's gradient separately. Default: none.
    ///
    /// To clip all gradients together, and for a sharded model, use
    /// [`Fsdp::clip_grad_norm`](crate::Fsdp::clip_grad_norm).
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
/// Loshchilov and Hutter, [*Decoupled Weight Decay
/// Regularization*](https://arxiv.org/abs/1711.05101), 2019, algorithm 2, with the schedule in η as
/// in [PyTorch](https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html).
///
/// The state is that of [`burn::optim::AdamW`].
///
/// # Panics
///
/// A step panics if a loaded state has another shape than its parameter.
#[derive(Clone)]
pub struct AdamW(FusedAdam<optim::AdamW>);

impl fmt::Debug for AdamW {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt_as("AdamW", f)
    }
}

impl AdamWConfig {
    /// Returns the optimizer of one parameter group, for
    /// [`ModuleOptimizer::with_group`](burn::optim::ModuleOptimizer::with_group). It ignores
    /// `grad_clipping`.
    pub fn build(&self) -> AdamW {
        let fallback = optim::AdamWConfig::new()
            .with_beta_1(self.beta_1)
            .with_beta_2(self.beta_2)
            .with_epsilon(self.epsilon)
            .with_weight_decay(self.weight_decay)
            .with_cautious_weight_decay(self.cautious_weight_decay)
            .with_amsgrad(self.amsgrad);
        let rule = AdamRule {
            beta_1: self.beta_1,
            beta_2: self.beta_2,
            epsilon: self.epsilon,
            amsgrad: self.amsgrad,
            decay: Decay::Decoupled {
                rate: self.weight_decay,
                cautious: self.cautious_weight_decay,
            },
        };
        AdamW(FusedAdam { rule, fallback: fallback.build(), foreach: false })
    }

    /// Returns the optimizer of a module, with `foreach`.
    pub fn init(&self) -> ModuleOptimizer {
        with_clipping(self.build().with_foreach(true).into(), self.grad_clipping.as_ref())
    }
}

impl AdamW {
    /// Sets whether the steps of up to eight parameters of a sharded model share a kernel launch on
    /// CubeCL devices, as `foreach` does in PyTorch. Default: off after `build()`, on after
    /// `init()`.
    ///
    /// Use it only for an optimizer that Burn's `ModuleOptimizer` calls directly. A step may then
    /// run only after all parameters have been passed to the optimizer, so another optimizer that
    /// wraps this one must not read the result of a step.
    pub fn with_foreach(mut self, foreach: bool) -> Self {
        self.0.foreach = foreach;
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
        let moments = state.map(|OnHost(state)| state.momentum);
        self.0.step(lr, tensor, grad, moments, AdamWState::new)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        OnHost(optim::AdamW::to_device(state.0, device))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_has_pytorchs_defaults_and_the_options() {
        let rule = AdamWConfig::new().build().0.rule;
        assert_eq!((rule.beta_1, rule.beta_2, rule.epsilon), (0.9, 0.999, 1e-8));
        assert!(!rule.amsgrad);
        let config = AdamWConfig::new()
            .with_weight_decay(0.1)
            .with_cautious_weight_decay(true)
            .with_amsgrad(true);
        let rule = config.build().0.rule;
        assert_eq!(rule.decay, Decay::Decoupled { rate: 0.1, cautious: true });
        assert!(rule.amsgrad);
    }
}
