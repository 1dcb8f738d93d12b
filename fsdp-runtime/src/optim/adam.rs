//! Adam, with an optional L2 penalty.

use std::fmt;

use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::optim::{self, AdamState, LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor};
use fsdp_kernels::{AdamRule, Decay};

use super::clipping::with_clipping;
use super::fused_adam::FusedAdam;
use super::on_host::OnHost;

/// Configuration of [`Adam`], with PyTorch's defaults. (Burn's default for ε is 1e-5.)
#[derive(Config, Debug)]
pub struct AdamConfig {
    /// β₁, the decay rate of the first moment, in `[0, 1)`. Default: 0.9.
    #[config(default = 0.9)]
    beta_1: f32,
    /// β₂, the decay rate of the second moment, in `[0, 1)`. Default: 0.999.
    #[config(default = 0.999)]
    beta_2: f32,
    /// ε, added to the denominator. Default: 1e-8.
    #[config(default = 1e-8)]
    epsilon: f32,
    /// λ, the L2 penalty: `λ · θ` is added to the gradient. Default: 0.
    #[config(default = 0.0)]
    weight_decay: f32,
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

/// Adam, with an optional L2 penalty: [`AdamW`](super::AdamW) with `g ← g + λ·θ` in place of
/// decoupled weight decay.
///
/// Kingma and Ba, [*Adam: A Method for Stochastic Optimization*](https://arxiv.org/abs/1412.6980),
/// 2015, as in [PyTorch](https://docs.pytorch.org/docs/stable/generated/torch.optim.Adam.html).
///
/// The state is that of [`burn::optim::Adam`].
///
/// # Panics
///
/// A step panics if a loaded state has another shape than its parameter.
#[derive(Clone)]
pub struct Adam(FusedAdam<optim::Adam>);

impl fmt::Debug for Adam {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt_as("Adam", f)
    }
}

impl AdamConfig {
    /// Returns the optimizer of one parameter group, for
    /// [`ModuleOptimizer::with_group`](burn::optim::ModuleOptimizer::with_group). It ignores
    /// `grad_clipping`.
    pub fn build(&self) -> Adam {
        let decay = optim::decay::WeightDecayConfig::new(self.weight_decay);
        let fallback = optim::AdamConfig::new()
            .with_beta_1(self.beta_1)
            .with_beta_2(self.beta_2)
            .with_epsilon(self.epsilon)
            .with_weight_decay((self.weight_decay != 0.0).then_some(decay))
            .with_amsgrad(self.amsgrad);
        let rule = AdamRule {
            beta_1: self.beta_1,
            beta_2: self.beta_2,
            epsilon: self.epsilon,
            amsgrad: self.amsgrad,
            decay: Decay::Coupled { penalty: self.weight_decay },
        };
        Adam(FusedAdam { rule, fallback: fallback.build(), foreach: false })
    }

    /// Returns the optimizer of a module, with `foreach`.
    pub fn init(&self) -> ModuleOptimizer {
        with_clipping(self.build().with_foreach(true).into(), self.grad_clipping.as_ref())
    }
}

impl Adam {
    /// Sets whether steps of several parameters share a kernel launch:
    /// see [`AdamW::with_foreach`](super::AdamW::with_foreach).
    pub fn with_foreach(mut self, foreach: bool) -> Self {
        self.0.foreach = foreach;
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
        let moments = state.map(|OnHost(state)| state.momentum);
        self.0.step(lr, tensor, grad, moments, AdamState::new)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        OnHost(optim::Adam::to_device(state.0, device))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_has_pytorchs_defaults_and_the_options() {
        let rule = AdamConfig::new().build().0.rule;
        assert_eq!((rule.beta_1, rule.beta_2, rule.epsilon), (0.9, 0.999, 1e-8));
        assert!(!rule.amsgrad);
        let config = AdamConfig::new().with_weight_decay(0.1).with_amsgrad(true);
        let rule = config.build().0.rule;
        assert_eq!(rule.decay, Decay::Coupled { penalty: 0.1 });
        assert!(rule.amsgrad);
    }
}
