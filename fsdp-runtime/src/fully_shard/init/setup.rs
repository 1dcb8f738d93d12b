//! The settings that stay fixed while one model is initialised.

use std::collections::HashSet;
use std::sync::Arc;

use burn::module::Param;
use burn::tensor::Tensor;

use super::broadcasts::StoredValues;
use super::init_device::InitDevice;
use crate::backend::{ModelBackend, Raw, RawFloat, ShardBackend};
use crate::collectives::device_work::DeviceWork;
use crate::collectives::{Op, ProcessGroup};
use crate::launch::Worker;
use crate::module::{ParamIndex, RandomStream};
use crate::options::FsdpOptions;
use crate::param_group::ParamSpec;
use crate::param_group::plan::ModelPlan;
use crate::runtime::schedule::Schedule;

/// The settings that stay fixed while one model is initialised.
pub(in crate::fully_shard) struct InitSetup<'a, B: ModelBackend> {
    pub(in crate::fully_shard) plan: &'a ModelPlan,
    /// Parameters that are loaded after construction, and so are not initialised.
    pub(in crate::fully_shard) loaded_later: HashSet<ParamIndex>,
    pub(in crate::fully_shard) schedule: Arc<Schedule<B>>,
    pub(in crate::fully_shard) worker: &'a Worker,
    pub(in crate::fully_shard) options: &'a FsdpOptions,
    pub(crate) random: &'a Arc<RandomStream>,
    pub(crate) device: InitDevice<B>,
}

impl<'a, B: ModelBackend> InitSetup<'a, B> {
    /// Returns the description of a parameter.
    pub(super) fn spec(&self, index: ParamIndex) -> &'a ParamSpec {
        &self.plan.units[index.unit].params[index.param]
    }

    /// Returns this rank's number.
    pub(super) fn rank(&self) -> usize {
        self.worker.rank().index()
    }

    /// Returns whether this rank receives the parameter from rank `root` without initialising it.
    pub(super) fn receives<const D: usize>(&self, param: &Param<Tensor<D>>, root: usize) -> bool {
        self.options.sync_module_states
            && self.options.cpu_ram_efficient_loading
            && self.rank() != root
            && !param.is_initialized()
    }

    /// Issues a broadcast of `numel` elements from the rank that passes `value`. Every rank stores
    /// the result of `keep` for the received tensor.
    pub(super) fn broadcast(
        &self,
        what: &str,
        numel: usize,
        value: Option<RawFloat<B>>,
        keep: impl FnOnce(RawFloat<B>) -> StoredValues<Raw<B>> + Send + 'static,
    ) -> DeviceWork<Raw<B>, StoredValues<Raw<B>>> {
        tracing::trace!(target: "fsdp", unit = %what, "fsdp::broadcast");
        let op = Op::new("broadcast", what).of(numel);
        let device = self.device.backend.clone();
        let (comm, after) = (self.worker.comm(), Raw::<B>::fence(&device));
        let to = device.clone();
        DeviceWork::issue(comm, comm.world(), &to, after, move |group| {
            ProcessGroup::<Raw<B>>::broadcast(group, &op, &device, value).map(keep)
        })
    }
}
