//! The losses of a step, as [`Fsdp`](crate::Fsdp) passes them to backward: means, or sums with weights.

use std::sync::atomic::Ordering;

use super::core::Schedule;
use super::step_loss::{StepLoss, SumStep};
use crate::backend::ModelBackend;
use crate::collectives::Op;
use crate::error::{Error, ScheduleError};

/// Losses that tensor parallel ranks compare at the begin of a run.
const CHECKED_LOSSES: usize = 3;

/// A loss that has been added to the present step.
#[derive(Debug)]
#[must_use]
pub(crate) struct AddedLoss {
    /// Number that the loss is multiplied by before backward; `None` for a mean.
    pub(crate) factor: Option<f64>,
    /// The losses of the step before this one.
    before: Option<StepLoss>,
}

/// The losses of the present step.
pub(crate) trait ScheduleLosses {
    /// Checks, in the first passes, that tensor parallel ranks have the same loss.
    fn check_loss(&self, loss: &dyn Fn() -> f64) -> Result<(), Error>;
    /// Adds the loss of a micro-batch to the step: a sum with a weight, or a mean without one.
    /// `accumulate` says that another one of the same step follows. Every rank calls it.
    fn add_loss(&self, weight: Option<f64>, accumulate: bool) -> Result<AddedLoss, Error>;
    /// Takes a loss whose backward did not run out of the step.
    fn remove_loss(&self, added: AddedLoss);
    /// Ends the step. Returns the factor of its reduced gradients, if it is not 1.
    fn end_losses(&self) -> Option<f64>;
}

impl<B: ModelBackend> Schedule<B> {
    /// Returns the sum of a weight over all ranks, added in rank order.
    fn weight_of_all_ranks(&self, own: f64) -> Result<f64, Error> {
        let op = Op::new("all_reduce", "the weight of the loss");
        tracing::trace!(target: "fsdp", own, "fsdp::reduce_weight");
        let all = self.comm.issue(move |group| group.exchange(&op, own)).wait()?;
        Ok(all.iter().map(|weight| **weight).sum())
    }
}

impl<B: ModelBackend> ScheduleLosses for Schedule<B> {
    fn check_loss(&self, loss: &dyn Fn() -> f64) -> Result<(), Error> {
        let Some(group) = &self.settings.groups.tensor else { return Ok(()) };
        if self.counters.loss_checks.fetch_add(1, Ordering::Relaxed) >= CHECKED_LOSSES {
            return Ok(());
        }
        let (op, own) = (Op::new("all_gather", "losses of tensor parallel ranks"), loss());
        let all = self.comm.issue_on(group, move |group| group.exchange(&op, own)).wait()?;
        let differs = |other: &&f64| (**other - own).abs() > 1e-4 * own.abs().max(1e-3);
        match all.iter().map(|other| &**other).find(differs) {
            Some(&other) => Err(ScheduleError::DifferentLosses { own, other }.into()),
            None => Ok(()),
        }
    }

    fn add_loss(&self, weight: Option<f64>, accumulate: bool) -> Result<AddedLoss, Error> {
        let before = self.lock().gradients.loss;
        let earlier = match (before, weight) {
            (Some(StepLoss::Mean), Some(_)) | (Some(StepLoss::Sum(_)), None) => {
                return Err(ScheduleError::MixedLosses { sum: weight.is_some() }.into());
            }
            (Some(StepLoss::Sum(step)), Some(_)) => Some(step),
            (None | Some(StepLoss::Mean), _) => None,
        };
        let (loss, factor) = match weight {
            None => (StepLoss::Mean, None),
            Some(weight) => {
                let over_ranks = |own| self.weight_of_all_ranks(own);
                let step = SumStep::add(earlier, weight, !accumulate, over_ranks)?;
                let world = self.settings.mesh.world.size();
                (StepLoss::Sum(step), Some(step.loss_factor(world)))
            }
        };
        self.lock().gradients.loss = Some(loss);
        Ok(AddedLoss { factor, before })
    }

    fn remove_loss(&self, added: AddedLoss) {
        self.lock().gradients.loss = added.before;
    }

    fn end_losses(&self) -> Option<f64> {
        match self.lock().gradients.loss.take() {
            Some(StepLoss::Sum(step)) => step.gradient_factor(),
            Some(StepLoss::Mean) | None => None,
        }
    }
}
