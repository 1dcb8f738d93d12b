//! Computes a [`MemoryForecast`]: lays the module out as [`fully_shard`](crate::fully_shard) does, and
//! adds up what [`Stats::memory`](crate::model::Stats::memory) will count. No parameter is initialised.

use super::buffers::{copied, gathered, sending};
use super::gradients::Gradients;
use crate::backend::DeviceKind;
use crate::error::ShardError;
use crate::layout::Mesh;
use crate::module::FsdpModule;
use crate::options::{FsdpOptions, OffloadPolicy};
use crate::param_group::Unit;
use crate::param_group::memory::{HostForecast, MemoryForecast};
use crate::param_group::plan::ModelPlan;
use crate::param_group::probes::probe_elements;

impl MemoryForecast {
    /// Returns the memory that the rank of `mesh` will need for `module` under `options`.
    ///
    /// For the hybrid strategies without a `shard_size`, all ranks are assumed to be on one
    /// machine. The device that computes is assumed to be that of the module, by which
    /// [`with_reductions_in_flight`](FsdpOptions::with_reductions_in_flight) has its default. A
    /// CubeCL device needs no gather buffers for f32 parameters that are not divided among ranks.
    ///
    /// Frozen parameters have neither gradients nor optimizer state. On a device without autodiff, where
    /// no parameter requires a gradient, all of them count as trained.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`fully_shard`](crate::fully_shard) for a model that cannot be sharded
    /// or an option that is out of its range.
    pub fn new<M: FsdpModule>(
        module: &M,
        mesh: Mesh,
        options: &FsdpOptions,
    ) -> Result<Self, ShardError> {
        options.check()?;
        let mesh = options.mesh(mesh, mesh.world.size())?;
        let ModelPlan { units, device, .. } = ModelPlan::new(module, mesh, options)?;
        Ok(Self::of_units(&units, options, DeviceKind::of(&device)))
    }

    /// Returns the memory of a rank with these units. `kind` is that of the device that computes.
    pub(crate) fn of_units(units: &[Unit], options: &FsdpOptions, kind: DeviceKind) -> Self {
        let (mut shards, mut replicated) = (0, 0);
        for (of_shards, of_replicated) in units.iter().map(Unit::stored_bytes) {
            shards += of_shards;
            replicated += of_replicated;
        }
        let offloaded = options.offload != OffloadPolicy::None;
        let gradients = Gradients::new(units, offloaded, options.reductions_in_flight(kind));
        let (on_device, on_host) = gradients.once();
        let host = HostForecast { shards, replicated, gradients: on_host, ..Default::default() };
        let device_shards = match options.offload {
            OffloadPolicy::None => shards,
            OffloadPolicy::OptimizerOnly => units.iter().map(Unit::sent_bytes).sum(),
            _ => 0,
        };
        let device_replicated = match offloaded {
            true => copied(units, options.gather_buffers()),
            false => replicated,
        };
        Self {
            shards: device_shards,
            replicated: device_replicated,
            gathered: gathered(units, options.gather_buffers()) + sending(units, options.offload),
            gradients: on_device,
            optimizer: 0,
            activations: 0,
            host: if offloaded { host } else { HostForecast::default() },
            accumulated: gradients.accumulated(options.gradient_accumulation),
            stepped: units.iter().map(Unit::reduced_bytes).sum(),
            step_copy: units.iter().map(Unit::step_copy_bytes).max().unwrap_or(0),
            probes: if options.optimizer_check { probe_elements(units) } else { 0 },
            offloaded,
            on_host: kind == DeviceKind::Flex,
        }
    }
}
