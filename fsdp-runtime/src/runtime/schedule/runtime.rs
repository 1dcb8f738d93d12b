//! [`Runtime`]: the calls from hooks and parameters into the schedule.

use std::sync::Arc;

use burn::tensor::{DType, DispatchTensor};
use fsdp_kernels::AttentionRule;

use super::core::Schedule;
use super::unit_state::LocalShard;
use crate::backend::{ModelBackend, StoredTensor};
use crate::error::Error;
use crate::layout::{Mesh, TensorSplit};
use crate::module::{CallId, Exchange, ParamIndex, Runtime, SavedForward};

impl<B: ModelBackend> Runtime for Schedule<B> {
    fn in_forward(&self) -> bool {
        self.lock().open_forwards > 0
    }

    fn is_field_unit(&self, unit: usize) -> bool {
        self.units[unit].field
    }

    fn unit_name(&self, unit: usize) -> String {
        self.units[unit].name.to_string()
    }

    fn register_shard(&self, index: ParamIndex, base: DispatchTensor) {
        let Some((value, leaf, _)) = StoredTensor::from_dispatch(base, self.settings.storage)
        else {
            return;
        };
        let mut shard = LocalShard::new(value, leaf);
        let state = &mut *self.lock();
        let registered = &mut state.units[index.unit].shards[index.param];
        if let Some(earlier) = registered
            && state.buffers.turns.holds(index.unit)
        {
            // The copy on the device stays as long as the unit stays gathered.
            shard.on_device = earlier.on_device.clone();
        }
        *registered = Some(shard);
    }

    fn pre_forward(
        &self,
        unit: usize,
        params: &[usize],
        inputs: Vec<DispatchTensor>,
    ) -> Result<Option<CallId>, Error> {
        self.pre_forward(unit, params, inputs)
    }

    fn param_path(&self, index: ParamIndex) -> String {
        self.param(index).1.path.clone()
    }

    fn casts_input(&self, unit: usize, input: DispatchTensor) -> bool {
        self.casts_input(unit, input)
    }

    fn casts_tables(&self) -> bool {
        !self.settings.tables.cast.is_empty()
    }

    fn table_dtype(&self, path: &str) -> Option<DType> {
        self.settings.tables.cast.get(path).copied()
    }

    fn casts_arguments(&self, unit: usize) -> bool {
        self.settings.tables.may_cast_arguments(&self.units[unit])
    }

    fn argument_dtype(
        &self,
        unit: usize,
        types: &[&'static str],
        table: (DType, bool),
    ) -> Option<DType> {
        self.settings.tables.of_argument(&self.units[unit], types, table)
    }

    fn map_input(&self, unit: usize, input: DispatchTensor) -> DispatchTensor {
        self.map_input(unit, input)
    }

    fn begin_recomputed_forward(&self, id: CallId, inputs: Vec<DispatchTensor>) -> bool {
        self.begin_recomputed_forward(id, inputs)
    }

    fn recomputed_unit(&self, id: CallId) -> Option<(String, &'static str)> {
        self.recomputed_unit(id)
    }

    fn detach_input(&self, id: CallId, input: DispatchTensor) -> DispatchTensor {
        self.detach_input(id, input)
    }

    fn save_input(&self, id: CallId, input: DispatchTensor) -> DispatchTensor {
        self.save_input(id, input)
    }

    fn save_forward(&self, id: CallId, forward: SavedForward) {
        self.save_forward(id, forward);
    }

    fn hook_output(self: Arc<Self>, id: CallId, output: DispatchTensor) -> DispatchTensor {
        self.hook_output(id, output)
    }

    fn post_forward(&self, id: CallId) -> Result<(), Error> {
        self.post_forward(id)
    }

    fn abort_forward(&self, id: CallId) {
        self.abort_forward(id);
    }

    fn reduce_dtype(&self, index: ParamIndex) -> DType {
        self.param(index).1.reduce_dtype
    }

    fn split(&self, index: ParamIndex) -> Option<TensorSplit> {
        self.param(index).1.split
    }

    fn is_shared(&self, index: ParamIndex) -> bool {
        self.param(index).1.is_shared
    }

    fn check_tensor_inputs(&self, digest: &mut dyn FnMut() -> f64) -> Result<(), Error> {
        self.check_inputs(digest)
    }

    fn exchange(
        &self,
        exchange: Exchange,
        tensor: DispatchTensor,
    ) -> Result<DispatchTensor, Error> {
        self.exchange_tensor(exchange, tensor)
    }

    fn ranks(&self) -> Mesh {
        self.settings.mesh
    }

    fn check_positions(&self, positions: usize) -> Result<(), Error> {
        self.check_positions_of_attention(positions)
    }

    fn attend_in_context(
        &self,
        tensors: [DispatchTensor; 3],
        bias: Option<DispatchTensor>,
        rule: &AttentionRule,
    ) -> Result<DispatchTensor, Error> {
        self.attend(tensors, bias, rule)
    }

    fn materialize(
        self: Arc<Self>,
        index: ParamIndex,
        base: DispatchTensor,
    ) -> Result<DispatchTensor, Error> {
        Self::materialize(&self, index, base)
    }
}
