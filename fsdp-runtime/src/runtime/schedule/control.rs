//! Changes, between passes, of when units are gathered and resharded and of how gradients are
//! divided.

use std::sync::Arc;

use super::buffers::GatherBuffers;
use super::core::Schedule;
use super::state::State;
use crate::backend::ModelBackend;
use crate::collectives::Op;
use crate::collectives::comm::Communicator;
use crate::collectives::group::{AnyProcessGroup, blocks};
use crate::error::{Error, ScheduleError, ShardError};
use crate::layout::{Mesh, WorldSize};
use crate::options::{GradientAccumulation, ReshardAfterForward, resolve_reshard};
use crate::param_group::UnitControl;
use crate::param_group::memory::MemoryKind;

/// Settings of a sharded model that may change between passes. Every rank calls each method, with the
/// same arguments.
pub(crate) trait ScheduleControl {
    /// Changes when units are gathered and resharded. `what` describes the change, for an error of
    /// ranks that differ.
    fn change_controls(
        &self,
        what: &str,
        change: &mut dyn FnMut(&mut [UnitControl]),
    ) -> Result<(), Error>;
    /// Returns a setting of resharding that all ranks of the mesh can use, with the process groups
    /// that it needs.
    fn prepare_reshard(&self, reshard: ReshardAfterForward) -> Result<ReshardAfterForward, Error>;
    /// Sets the number by which sums of gradients are divided, from the next reduction on.
    fn set_divide_factor(&self, factor: f64) -> Result<(), Error>;
    /// Sets the form in which the gradients of micro-batches are accumulated, from the next backward
    /// on.
    fn set_accumulation(&self, accumulation: GradientAccumulation) -> Result<(), Error>;
}

/// Returns the process group in which `size` neighbouring ranks of the shard group keep parts of
/// gathered parameters for each other. Every rank calls it.
pub(crate) fn block_group(
    comm: &Communicator,
    shard: &Arc<AnyProcessGroup>,
    mesh: Mesh,
    size: usize,
) -> Result<Arc<AnyProcessGroup>, Error> {
    let size = WorldSize::new(size).map_err(ShardError::from)?;
    // Groups are created by collectives, which all run on the communication thread.
    let split = move |group: &AnyProcessGroup| blocks(group, mesh, size);
    Ok(Arc::new(comm.issue_on(shard, split).wait()?))
}

impl<B: ModelBackend> Schedule<B> {
    /// Returns an error if a forward or a backward runs, or if a backward is still to come.
    fn refuse_change_during_pass(&self, state: &State<B>) -> Result<(), Error> {
        match self.unit_in_pass(state) {
            Some(unit) => Err(ScheduleError::ControlledDuringPass { unit }.into()),
            None => Ok(()),
        }
    }

    /// Compares the description of a change on all ranks.
    fn agree_on(&self, what: &str) -> Result<(), Error> {
        let op = Op::new("barrier", what);
        self.comm.issue(move |group| group.exchange(&op, ())).wait()?;
        Ok(())
    }
}

impl<B: ModelBackend> ScheduleControl for Schedule<B> {
    fn change_controls(
        &self,
        what: &str,
        change: &mut dyn FnMut(&mut [UnitControl]),
    ) -> Result<(), Error> {
        self.refuse_change_during_pass(&self.lock())?;
        self.agree_on(what)?;
        let mut guard = self.lock();
        let state = &mut *guard;
        for unit in 0..self.units.len() {
            self.evict(state, unit)?;
            state.units[unit].has_kept_part = false;
            state.units[unit].kept_leaves = None;
        }
        change(&mut state.controls);
        let gather_buffers = self.settings.timing.gather_buffers;
        let controls = &state.controls;
        let common = state.buffers.common().clone();
        let mut buffers =
            GatherBuffers::new(gather_buffers, &self.device, &self.units, controls, common);
        let before = state.buffers.bytes();
        buffers.take_held(&mut state.buffers);
        state.buffers = buffers;
        self.tracker.give_back(MemoryKind::GatherBuffers, before, None);
        self.tracker.take(MemoryKind::GatherBuffers, state.buffers.bytes(), None);
        Ok(())
    }

    fn prepare_reshard(&self, reshard: ReshardAfterForward) -> Result<ReshardAfterForward, Error> {
        let mesh = self.settings.mesh;
        let reshard = resolve_reshard(reshard, mesh)?;
        if let ReshardAfterForward::To(size) = reshard
            && !self.lock().blocks.contains_key(&size)
        {
            let block = block_group(&self.comm, &self.settings.groups.shard, mesh, size)?;
            self.lock().blocks.insert(size, block);
        }
        Ok(reshard)
    }

    fn set_divide_factor(&self, factor: f64) -> Result<(), Error> {
        self.refuse_change_during_pass(&self.lock())?;
        self.agree_on(&format!("the change of gradient_divide_factor to {factor}"))?;
        self.lock().gradients.divide_factor = Some(factor);
        Ok(())
    }

    fn set_accumulation(&self, accumulation: GradientAccumulation) -> Result<(), Error> {
        self.refuse_change_during_pass(&self.lock())?;
        self.agree_on(&format!("the change of gradient_accumulation to {accumulation:?}"))?;
        self.lock().gradients.accumulation = accumulation;
        Ok(())
    }
}
