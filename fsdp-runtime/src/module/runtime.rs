//! [`Runtime`]: the schedule of a sharded model, as its hooks and parameters see it.

use std::fmt::{self, Debug};
use std::sync::Arc;

use burn::tensor::{DType, DispatchTensor};
use fsdp_kernels::AttentionRule;

use super::exchange::Exchange;
use super::random::Draw;
use crate::error::Error;
use crate::layout::{Mesh, TensorSplit};

/// The index of a parameter in a sharded model: entry `entry` of unit `unit`, both counted in
/// layout order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ParamIndex {
    pub(crate) unit: usize,
    pub(crate) param: usize,
}

/// The id of one forward of one unit, valid from its `pre_forward` to its `post_backward`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct CallId(pub(crate) u64);

/// A forward with its saved inputs. It passes each tensor of the inputs through the given map,
/// runs, and returns the forward's output.
pub(crate) type ForwardFn<O> =
    Box<dyn FnOnce(&mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> O + Send>;

/// A forward saved to be recomputed once in backward.
pub(crate) struct SavedForward {
    pub(crate) run: ForwardFn<Vec<DispatchTensor>>,
    /// Random draws of the first run, which the recomputation repeats.
    pub(crate) draws: Vec<Draw>,
}

impl Debug for SavedForward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SavedForward").field("draws", &self.draws.len()).finish_non_exhaustive()
    }
}

/// The schedule of a sharded model, as hooks and parameters see it, for any backend.
///
/// A forward under recomputation goes through
/// [`begin_recomputed_forward`](Self::begin_recomputed_forward), then
/// [`detach_input`](Self::detach_input) of each input in order, then
/// [`save_input`](Self::save_input) of each input in the same order, and
/// [`save_forward`](Self::save_forward) after it has run.
pub(crate) trait Runtime: Debug + Send + Sync {
    /// Returns whether a hooked forward is running. The outermost one reads the shards of all units
    /// below it.
    fn in_forward(&self) -> bool;
    /// Returns whether a unit is one because of `#[fsdp(unit)]` on its field. The hooks of such a
    /// unit surround the calls of its `forward`.
    fn is_field_unit(&self, unit: usize) -> bool;
    /// Returns a unit's name.
    fn unit_name(&self, unit: usize) -> String;
    /// Registers a shard that was read from the module, to be gathered from.
    fn register_shard(&self, index: ParamIndex, base: DispatchTensor);
    /// Starts a hooked forward. Returns `None` if a forward of the same unit is already running.
    /// `params` are the parameters of the called module, if the hooks surround the call; in a unit of
    /// several fields they tell which of them runs.
    fn pre_forward(
        &self,
        unit: usize,
        params: &[usize],
        inputs: Vec<DispatchTensor>,
    ) -> Result<Option<CallId>, Error>;
    /// Returns the module path of a parameter.
    fn param_path(&self, index: ParamIndex) -> String;
    /// Returns whether [`map_input`](Self::map_input) casts an input.
    fn casts_input(&self, unit: usize, input: DispatchTensor) -> bool;
    /// Returns whether the options cast a table of the model.
    fn casts_tables(&self) -> bool;
    /// Returns the dtype to which the table at a module path is cast, if it is.
    fn table_dtype(&self, path: &str) -> Option<DType>;
    /// Returns whether the options may cast a table in an argument of a unit.
    fn casts_arguments(&self, unit: usize) -> bool;
    /// Returns the dtype to which a table in an argument of a unit is cast, if it is. `types` are the
    /// names of the types that hold it, outermost first. `table` has its dtype, and whether its module
    /// computes in the device's default dtype.
    fn argument_dtype(
        &self,
        unit: usize,
        types: &[&'static str],
        table: (DType, bool),
    ) -> Option<DType>;
    /// Casts an input of a unit's forward to the unit's compute dtype.
    fn map_input(&self, unit: usize, input: DispatchTensor) -> DispatchTensor;
    /// Begins a forward that is recomputed in backward and records no graph. Returns `false`, and
    /// begins nothing, where the call is recorded normally. `inputs` are all tensors that the
    /// forward takes.
    fn begin_recomputed_forward(&self, call: CallId, inputs: Vec<DispatchTensor>) -> bool;
    /// Returns the name and the type of the unit of a call that is recomputed in backward and has a
    /// trained parameter; `None` for any other call.
    fn recomputed_unit(&self, call: CallId) -> Option<(String, &'static str)>;
    /// Returns an input of a recomputed forward without its graph.
    fn detach_input(&self, call: CallId, input: DispatchTensor) -> DispatchTensor;
    /// Saves a detached input for backward. Returns the tensor to keep on the device: the input
    /// itself, or a one-element tensor where the input is offloaded to the host.
    fn save_input(&self, call: CallId, input: DispatchTensor) -> DispatchTensor;
    /// Saves a recomputed forward after its first run.
    fn save_forward(&self, call: CallId, forward: SavedForward);
    /// Hooks an output of the unit, and returns it: its gradient first gathers the unit for
    /// backward.
    fn hook_output(self: Arc<Self>, call: CallId, output: DispatchTensor) -> DispatchTensor;
    /// Ends a hooked forward.
    fn post_forward(&self, call: CallId) -> Result<(), Error>;
    /// Ends a hooked forward that panicked.
    fn abort_forward(&self, call: CallId);
    /// Returns the dtype in which the gradient of a parameter is reduced.
    fn reduce_dtype(&self, index: ParamIndex) -> DType;
    /// Returns the part of a parameter that this rank has among its tensor parallel ranks; `None` for a
    /// whole one.
    fn split(&self, index: ParamIndex) -> Option<TensorSplit>;
    /// Returns whether tensor parallel ranks use the whole parameter with parts of other values.
    fn is_shared(&self, index: ParamIndex) -> bool;
    /// Checks that tensor parallel ranks have equal digests of what they call a layer with.
    fn check_tensor_inputs(&self, digest: &mut dyn FnMut() -> f64) -> Result<(), Error>;
    /// Exchanges a tensor between the tensor parallel ranks.
    fn exchange(&self, exchange: Exchange, tensor: DispatchTensor)
    -> Result<DispatchTensor, Error>;
    /// Returns the mesh.
    fn ranks(&self) -> Mesh;
    /// Checks the number of positions that attention is called with, before it is that of whole rows. Under
    /// sequence parallel these are the rows that a split layer has returned.
    fn check_positions(&self, positions: usize) -> Result<(), Error>;
    /// Computes attention of this rank's queries with the keys and values of all context parallel ranks, given
    /// those of this rank. `bias` is that of whole rows. The rule has the keys of whole rows that each query of
    /// this rank sees.
    fn attend_in_context(
        &self,
        tensors: [DispatchTensor; 3],
        bias: Option<DispatchTensor>,
        rule: &AttentionRule,
    ) -> Result<DispatchTensor, Error>;
    /// Returns the effective value of a parameter, given its base.
    fn materialize(
        self: Arc<Self>,
        index: ParamIndex,
        base: DispatchTensor,
    ) -> Result<DispatchTensor, Error>;
}
