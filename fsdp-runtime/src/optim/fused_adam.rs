//! The common implementation of Adam and AdamW: the choice between the fused step and Burn's
//! operations.

use std::fmt;

use burn::optim::{AdaptiveMomentumState, LearningRate, Optimizer};
use burn::tensor::Tensor;
use fsdp_kernels::AdamRule;

use super::fused;
use super::on_host::OnHost;
use super::state_bytes::bytes;
use crate::param_group::memory::report;

/// Adam or AdamW. `O` is Burn's optimizer with the same rule, which steps the tensors that no
/// kernel takes.
#[derive(Clone)]
pub(super) struct FusedAdam<O> {
    pub(super) rule: AdamRule,
    pub(super) fallback: O,
    /// Whether steps of several parameters may share a kernel launch.
    pub(super) foreach: bool,
}

impl<O> FusedAdam<O> {
    /// Formats the optimizer under its public name.
    pub(super) fn fmt_as(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name)
            .field("rule", &self.rule)
            .field("foreach", &self.foreach)
            .finish_non_exhaustive()
    }

    /// Steps one parameter. `new_state` wraps moments as the state of `O`.
    pub(super) fn step<S, const D: usize>(
        &self,
        lr: LearningRate,
        param: Tensor<D>,
        grad: Tensor<D>,
        moments: Option<AdaptiveMomentumState<D>>,
        new_state: fn(AdaptiveMomentumState<D>) -> S,
    ) -> (Tensor<D>, Option<OnHost<S>>)
    where
        O: Optimizer<State<D> = S>,
    {
        let moments_of = if self.rule.amsgrad { 3 } else { 2 };
        report(moments_of * bytes(&param));
        if fused::takes_adam(&param, &grad, moments.as_ref()) {
            let (param, moments) = fused::adam(&self.rule, lr, param, grad, moments, self.foreach);
            return (param, Some(OnHost(new_state(moments))));
        }
        let (param, state) = self.fallback.step(lr, param, grad, moments.map(new_state));
        (param, state.map(OnHost))
    }
}
