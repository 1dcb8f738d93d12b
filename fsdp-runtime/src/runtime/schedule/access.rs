//! The state of a schedule between passes, as [`Fsdp`](crate::Fsdp) reads and changes it.

use std::sync::Arc;

use burn::tensor::DispatchTensor;
use fsdp_kernels::RandomRounding;

use super::core::Schedule;
use super::recompute_first_run::is_tracked;
use crate::backend::{ModelBackend, StoredTensor};
use crate::collectives::comm::Communicator;
use crate::error::{Error, ShardError};
use crate::layout::{Mesh, WorldSize};
use crate::module::{ParamIndex, RandomStream};
use crate::options::ShardingStrategy;
use crate::param_group::{ParamSpec, Placement, Unit};

/// The state of a schedule on this rank.
pub(crate) trait ScheduleState {
    /// Returns the position of this rank in the mesh.
    fn mesh(&self) -> Mesh;
    /// Returns the position of this rank among all ranks, tensor parallel ones included.
    fn world_mesh(&self) -> Mesh;
    /// Returns the handle to the communication thread, for all ranks.
    fn world_comm(&self) -> Arc<Communicator>;
    /// Checks that this rank has whole matrices, for a call that takes no parts of tensor parallel ranks.
    fn check_whole(&self, what: &'static str, instead: &'static str) -> Result<(), ShardError> {
        match self.mesh().tensor_size() {
            WorldSize::ONE => Ok(()),
            ranks => Err(ShardError::SplitMatrices { what, ranks, instead }),
        }
    }
    /// Returns the model's units, in layout order.
    fn units(&self) -> &[Unit];
    /// Returns the specification of a parameter.
    fn spec(&self, index: ParamIndex) -> &ParamSpec {
        &self.units()[index.unit].params[index.param]
    }
    /// Returns the sharding strategy.
    fn strategy(&self) -> ShardingStrategy;
    /// Returns the model's random stream on this rank.
    fn random(&self) -> &Arc<RandomStream>;
    /// Starts a backward pass. `accumulate` says that another one of the same step follows.
    fn begin_backward(&self, accumulate: bool);
    /// Returns whether a tensor is on an autodiff graph.
    fn is_tracked(&self, tensor: DispatchTensor) -> bool;
    /// Ends a backward pass.
    fn finish_backward(&self) -> Result<(), Error>;
    /// Takes the reduced gradient of a parameter. Returns `None` if there is none, or if it was
    /// taken before.
    fn take_gradient(&self, index: ParamIndex) -> Option<DispatchTensor>;
    /// Returns what this rank stores of a parameter in f32.
    fn widened(&self, value: DispatchTensor) -> DispatchTensor;
    /// Returns the f32 elements that an optimizer gave a parameter, rounded at random to the dtype in
    /// which it is stored.
    fn rounded(&self, index: ParamIndex, value: DispatchTensor) -> DispatchTensor;
    /// Drops the references to the module's parameters, unless a pass still needs them.
    fn forget(&self);
    /// Marks parameters as loaded.
    fn set_loaded(&self, params: &[ParamIndex]);
    /// Passes the elements of a stored tensor to `f`, in order, as bytes in host memory. Copies
    /// them only if they are on another device.
    fn with_bytes(&self, tensor: DispatchTensor, f: &mut dyn FnMut(&[u8]));
}

impl<B: ModelBackend> ScheduleState for Schedule<B> {
    fn mesh(&self) -> Mesh {
        self.settings.mesh
    }

    fn world_mesh(&self) -> Mesh {
        match self.settings.mesh.tensor_size() {
            WorldSize::ONE => self.settings.mesh,
            _ => self.settings.mesh.of_all_ranks(),
        }
    }

    fn world_comm(&self) -> Arc<Communicator> {
        self.comm.among(self.world.clone())
    }

    fn units(&self) -> &[Unit] {
        &self.units
    }

    fn strategy(&self) -> ShardingStrategy {
        self.settings.strategy
    }

    fn random(&self) -> &Arc<RandomStream> {
        &self.random
    }

    fn begin_backward(&self, accumulate: bool) {
        self.begin_backward_pass(accumulate);
    }

    fn is_tracked(&self, tensor: DispatchTensor) -> bool {
        is_tracked::<B>(tensor)
    }

    fn finish_backward(&self) -> Result<(), Error> {
        self.end_backward_pass()
    }

    fn take_gradient(&self, index: ParamIndex) -> Option<DispatchTensor> {
        let gradient = self.lock().units[index.unit].reduced[index.param].take()?;
        Some(StoredTensor::<B>::raise(gradient).into_dispatch())
    }

    fn widened(&self, value: DispatchTensor) -> DispatchTensor {
        match StoredTensor::<B>::from_dispatch(value.clone(), self.settings.storage) {
            Some((stored, ..)) => stored.widened().into_dispatch(),
            None => value,
        }
    }

    fn rounded(&self, index: ParamIndex, value: DispatchTensor) -> DispatchTensor {
        match StoredTensor::<B>::from_dispatch(value.clone(), self.settings.storage) {
            Some((stored, ..)) => stored.rounded(self.rounding(index)).into_dispatch(),
            None => value,
        }
    }

    fn forget(&self) {
        let state = &mut *self.lock();
        if state.open_forwards == 0 && state.calls.is_empty() {
            // A collective that has failed fails again at the next one.
            let _ = self.end_reads_of_shards(state);
        }
    }

    fn set_loaded(&self, params: &[ParamIndex]) {
        let mut state = self.lock();
        for index in params {
            state.unloaded.remove(index);
        }
    }

    fn with_bytes(&self, tensor: DispatchTensor, f: &mut dyn FnMut(&[u8])) {
        if let Some((tensor, ..)) = StoredTensor::<B>::from_dispatch(tensor, self.settings.storage)
        {
            let tensor = self.lower(vec![tensor]).pop();
            tensor.expect("`lower` returns as many buffers").with_bytes(f);
        }
    }
}

impl<B: ModelBackend> Schedule<B> {
    /// Returns the rounding of this rank's part of a parameter after the present step. An element has the random
    /// bits that it has in the whole parameter.
    pub(super) fn rounding(&self, index: ParamIndex) -> RandomRounding {
        let (_, spec) = self.param(index);
        let (key, counter) = self.random.rounding(&spec.path);
        let first = spec.range().start;
        let (first, part) = match spec.split {
            // The elements of a part of the rows are neighbours in the parameter.
            Some(split) if split.dim == 0 => (split.part * spec.numel() + first, None),
            Some(split) => (first, Some(split.of_rows(&spec.shape))),
            None => (first, None),
        };
        RandomRounding { key, counter, first, part }
    }

    /// Marks `params`, and no others, as not loaded yet. Their use is an error until they are
    /// loaded.
    pub(crate) fn set_unloaded(&self, params: &[ParamIndex]) {
        let is_owner =
            |index: &&ParamIndex| !matches!(self.param(**index).1.placement, Placement::TiedTo(_));
        self.lock().unloaded = params.iter().filter(is_owner).copied().collect();
    }
}
