//! Memory accounting of an optimizer's state.

use burn::module::ParamId;
use burn::optim::ModuleOptimizer;

use super::optimizer_state::{StateNames, read};
use super::sharded_model::ShardedModel;
use crate::error::Error;
use crate::fully_shard::Stats;
use crate::fully_shard::optimizer_probe::Part;
use crate::module::FsdpModule;

impl<M: FsdpModule> Stats<'_, M> {
    /// Measures the tensors that `optimizer` holds for this model, and reports them in
    /// [`memory`](Self::memory) from then on.
    ///
    /// The [check](crate::FsdpOptions::with_optimizer_check) of the optimizer leaves state that belongs
    /// to no parameter, in host memory: 320 bytes for each moment of a sharded matrix, and 100 KiB for
    /// each moment of one matrix of each kind. It is part of the measure, and of
    /// [`host_memory`](Self::host_memory) where the model is on another device.
    ///
    /// The state is measured by copying it, one parameter at a time, so that at most one
    /// parameter's state exists twice. An optimizer has state only after the first step.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Record`](crate::errors::CheckpointError::Record) where Burn cannot convert the
    /// state to a record.
    pub fn record_optimizer(&self, optimizer: &ModuleOptimizer) -> Result<(), Error> {
        let mut ids = Vec::new();
        self.model.for_each_param(&mut |param| ids.push(param.id));
        let mut names = StateNames::default();
        let mut bytes_of = |ids: &[ParamId]| -> Result<usize, Error> {
            let states = read("the optimizer", optimizer, ids, &mut names)?;
            let tensors = states.values().flat_map(|state| &state.tensors);
            Ok(tensors.map(|tensor| tensor.bytes.len()).sum())
        };
        let (mut bytes, mut of_probes) = (0, 0);
        for id in ids {
            bytes += bytes_of(&[id])?;
            of_probes += bytes_of(&Part::ALL.map(|part| part.id(id)))?;
        }
        self.model.schedule.record_optimizer(bytes, of_probes);
        Ok(())
    }
}
