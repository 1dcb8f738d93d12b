//! [`BackwardHooks`]: the calls from the autodiff operations into the schedule.

use burn::backend::autodiff::NodeId;

use super::super::autodiff::{BackwardHooks, Depth, OpState};
use super::super::recompute::SavedCall;
use super::core::Schedule;
use crate::backend::{Float, ModelBackend};
use crate::error::Error;
use crate::module::CallId;

impl<B: ModelBackend> BackwardHooks<B> for Schedule<B> {
    fn pre_backward(&self, call: CallId, depth: Depth) -> Result<bool, Error> {
        self.begin_unit_backward(call, depth)
    }

    fn add_gradient(&self, call: CallId, entry: usize, gradient: Float<B>) -> Result<(), Error> {
        self.add_to_call(call, entry, gradient)
    }

    fn recompute(
        &self,
        state: &OpState<B>,
        reached: usize,
        saved: &SavedCall<B>,
    ) -> Result<Vec<(NodeId, Float<B>)>, Error> {
        self.recompute_and_backward(state, reached, saved)
    }
}
