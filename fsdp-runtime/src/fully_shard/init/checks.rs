//! Errors of this rank's initialisation, and checksums of the values that every rank initialised
//! itself.

use super::param_value::checksum;
use crate::backend::{Float, ShardBackend};
use crate::error::{Error, ShardError};
use crate::launch::Worker;
use crate::module::ParamIndex;
use crate::param_group::plan::ModelPlan;

/// The findings of one rank while it initialises a model.
#[derive(Default)]
pub(super) struct Checks {
    /// Checksum of each parameter, without `sync_module_states`.
    checksums: Vec<u64>,
    /// Parameters of `checksums`, in the same order.
    checked: Vec<ParamIndex>,
    /// First wrong parameter that only this rank knows of. The rank takes part in all collectives
    /// before it reports the error, so that no other rank waits for it.
    wrong_param: Option<ShardError>,
    /// First failure of a collective, which ends the process group.
    failed_collective: Option<Error>,
}

impl Checks {
    /// Adds the checksum of a full parameter.
    pub(super) fn add_checksum<B: ShardBackend>(&mut self, index: ParamIndex, full: &Float<B>) {
        self.checksums.push(checksum::<B>(full));
        self.checked.push(index);
    }

    /// Records a wrong parameter, unless one is recorded.
    pub(super) fn record_wrong_param(&mut self, error: ShardError) {
        self.wrong_param.get_or_insert(error);
    }

    /// Records a failed collective, unless one is recorded.
    pub(super) fn record_failed_collective(&mut self, error: Error) {
        self.failed_collective.get_or_insert(error);
    }

    /// Returns whether a collective has failed.
    pub(super) fn has_failed(&self) -> bool {
        self.failed_collective.is_some()
    }

    /// Returns the failure of a collective, if there is one.
    pub(super) fn take_failed_collective(&mut self) -> Option<Error> {
        self.failed_collective.take()
    }

    /// Returns the error of the first wrong parameter, if there is one.
    pub(super) fn take_wrong_param(&mut self) -> Result<(), ShardError> {
        self.wrong_param.take().map_or(Ok(()), Err)
    }

    /// Checks that every rank has initialised the same values. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`ShardError::ValueMismatch`] names the first parameter that differs.
    pub(super) fn compare_checksums(self, worker: &Worker, plan: &ModelPlan) -> Result<(), Error> {
        let all = worker.exchange_as("all_gather", "the initial values", self.checksums)?;
        for (rank, checksums) in worker.world().ranks().zip(&all) {
            let differs =
                checksums.iter().zip(all[0].iter()).position(|(found, expected)| found != expected);
            if let Some(number) = differs {
                let index = self.checked[number];
                let path = plan.units[index.unit].params[index.param].path.clone();
                return Err(ShardError::ValueMismatch { rank, path }.into());
            }
        }
        Ok(())
    }
}
