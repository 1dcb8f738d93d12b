//! Gathering the full state of an optimizer.

use std::collections::BTreeMap;

use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, DType, Tensor, TensorData};

use super::optimizer_local::NAME;
use super::optimizer_tensors::{OptimizerState, ParameterState};
use super::recipient::Recipient;
use super::selection::Selection;
use super::tensors::copied_data;
use crate::checkpoint::optimizer_state::{self, ParamState, StateNames, StateTensor};
use crate::checkpoint::ranks::{Ranks, SAVE_WHOLE};
use crate::checkpoint::scalar::Scalars;
use crate::checkpoint::sharded_model::{LocalParam, ShardedModel};
use crate::error::{CheckpointError, Error};
use crate::fully_shard::Fsdp;
use crate::module::FsdpModule;
use crate::param_group::{ParamSpec, Placement};

/// Gathers the full state of an optimizer for the selected parameters to the recipient. `whole`
/// says that one owner rank has the state of each sharded matrix in full. Every rank calls it, with
/// equal selections.
pub(super) fn gather_state<M: FsdpModule>(
    model: &Fsdp<M>,
    optimizer: &ModuleOptimizer,
    recipient: Recipient,
    whole: bool,
    selection: &Selection,
) -> Result<OptimizerState<TensorData>, Error> {
    model.schedule.check_whole("the gathered state of an optimizer", SAVE_WHOLE)?;
    recipient.check(model.mesh().world)?;
    let (ranks, keep) = (Ranks::from(model), recipient.is(model.mesh().rank));
    let mut full = OptimizerState::default();
    let mut names = StateNames::default();
    let mut params = Vec::new();
    model.for_each_param(&mut |param| params.push(param));
    for param in params.into_iter().filter(|param| selection.contains(param.index)) {
        let spec = model.spec(param.index);
        let state = optimizer_state::read(NAME, optimizer, &[param.id], &mut names)
            .map(|mut states| states.remove(&param.id));
        let gather = Gather { model, ranks: &ranks, spec, whole, keep };
        if let Some(state) = gather.param(param, state)? {
            full.parameters.insert(spec.path.clone(), state);
        }
    }
    Ok(full)
}

/// Name and dtype of each tensor in a parameter's state, and whether the tensor has the shard's
/// shape.
type TensorKinds = Vec<(String, DType, bool)>;

/// The gather of one parameter's state.
struct Gather<'a, M> {
    model: &'a Fsdp<M>,
    ranks: &'a Ranks,
    spec: &'a ParamSpec,
    /// Whether one owner rank has the state of a sharded matrix in full.
    whole: bool,
    /// Whether this rank receives the state.
    keep: bool,
}

impl<M: FsdpModule> Gather<'_, M> {
    /// Returns the parameter's full state on receiving ranks, if any rank has state of it. `own` is
    /// this rank's part of the state.
    fn param(
        &self,
        param: LocalParam,
        own: Result<Option<ParamState>, CheckpointError>,
    ) -> Result<Option<ParameterState<TensorData>>, Error> {
        let what = format!("optimizer state of `{}`", self.spec.path);
        // A rank with an empty shard has no state of the parameter and takes the names from another
        // rank.
        let kinds = own.as_ref().ok().and_then(Option::as_ref).map(|state| self.kinds(state));
        let mut own = self.ranks.agree(&what, own)?;
        let all = self.ranks.exchange(&what, kinds)?;
        let Some((scalars, kinds)) = all.iter().find_map(|kinds| kinds.as_ref().as_ref()) else {
            return Ok(None);
        };
        let mut tensors = BTreeMap::new();
        for (name, dtype, elementwise) in kinds {
            let own = own.as_mut().and_then(|state| {
                let at = state.tensors.iter().position(|tensor| tensor.name == *name)?;
                Some(state.tensors.swap_remove(at))
            });
            let data = match self.spec.placement {
                Placement::PerRank => self.gather_from_first_holder(&what, own)?,
                Placement::Shard(_) if self.whole => self.gather_from_first_holder(&what, own)?,
                Placement::Replicated => own.filter(|_| self.keep).map(StateTensor::into_data),
                _ if !elementwise => return Err(self.not_elementwise(own).into()),
                _ => self.gather_from_shards(&param, *dtype, own)?,
            };
            if let Some(data) = data {
                tensors.insert(name.clone(), data);
            }
        }
        Ok(self.keep.then(|| ParameterState { scalars: scalars.clone(), tensors }))
    }

    fn kinds(&self, state: &ParamState) -> (Scalars, TensorKinds) {
        let base_shape = self.spec.base_shape();
        let kind =
            |tensor: &StateTensor| (tensor.name.clone(), tensor.dtype, tensor.shape == base_shape);
        (state.scalars.clone(), state.tensors.iter().map(kind).collect())
    }

    /// Returns a tensor from the lowest rank that has it in full.
    fn gather_from_first_holder(
        &self,
        what: &str,
        own: Option<StateTensor>,
    ) -> Result<Option<TensorData>, Error> {
        let all = self.ranks.exchange(what, own.map(StateTensor::into_data))?;
        Ok(all.iter().find_map(|data| (**data).clone()).filter(|_| self.keep))
    }

    /// Returns a tensor of the parameter's shape, gathered from the shards. A rank without state
    /// takes part with a placeholder.
    fn gather_from_shards(
        &self,
        param: &LocalParam,
        dtype: DType,
        own: Option<StateTensor>,
    ) -> Result<Option<TensorData>, Error> {
        let bytes =
            own.map_or_else(|| Bytes::from_bytes_vec(vec![0; dtype.size()]), |own| own.bytes);
        let data = copied_data(&bytes, vec![bytes.len() / dtype.size()], dtype);
        let device = param.device.clone().inner();
        let shard = Tensor::<1>::from_data(data, (&device, dtype)).into_dispatch();
        self.model.schedule.full(param.index, shard, self.keep)
    }

    fn not_elementwise(&self, own: Option<StateTensor>) -> CheckpointError {
        CheckpointError::NotElementwise {
            tensor: self.spec.path.clone(),
            expected: self.spec.base_shape(),
            found: own.map(|own| own.shape).unwrap_or_default(),
        }
    }
}
