//! Memory accounting of an optimizer's state.

use burn::optim::ModuleOptimizer;

use super::optimizer_state::{StateNames, read};
use super::sharded_model::ShardedModel;
use crate::error::Error;
use crate::fully_shard::Stats;
use crate::module::FsdpModule;

impl<M: FsdpModule> Stats<'_, M> {
    /// Measures the tensors that `optimizer` holds for this model, and reports them in
    /// [`memory`](Self::memory) from then on.
    ///
    /// The state is measured by copying it, one parameter at a time, so that at most one
    /// parameter's state exists twice. An optimizer has state only after the first step.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Record`](crate::CheckpointError::Record) where Burn cannot convert the
    /// state to a record.
    pub fn record_optimizer(&self, optimizer: &ModuleOptimizer) -> Result<(), Error> {
        let mut ids = Vec::new();
        self.model.for_each_param(&mut |param| ids.push(param.id));
        let (mut names, mut bytes) = (StateNames::default(), 0);
        for id in ids {
            let states = read("the optimizer", optimizer, &[id], &mut names)?;
            let tensors = states.values().flat_map(|state| &state.tensors);
            bytes += tensors.map(|tensor| tensor.bytes.len()).sum::<usize>();
        }
        self.model.schedule.record_optimizer(bytes);
        Ok(())
    }
}
