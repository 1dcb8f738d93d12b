//! The sharded model, as a Burn module.

use std::any::type_name;
use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;

use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, ParamGroup};
use burn::store::ModuleRecord;
use burn::tensor::Device;
use fsdp_kernels::batched_steps;

use super::around_float::Around;
use super::gradient_hook::GradientHook;
use super::ignored_gradients::IgnoredGradients;
use super::optimizer_check::{OptimizerCheck, is_of_optimizers};
use super::place_shards::{PlaceShards, place_shards};
use super::step_in_f32::StepInF32;
#[cfg(feature = "train")]
use crate::error::LearnerError;
use crate::error::{SaveError, raise};
use crate::layout::Mesh;
#[cfg(feature = "train")]
use crate::layout::WorldSize;
use crate::module::opaque::visit_leaf;
use crate::module::{FsdpModule, ParamIndex};
use crate::param_group::memory::OptimizerStates;
use crate::param_group::plan::{IgnoredParam, Key};
use crate::param_group::{ParamSpec, Unit};
use crate::runtime::hooks::Collect;
use crate::runtime::schedule::ErasedSchedule;

/// A sharded model, as [`fully_shard`](crate::fully_shard) returns it.
///
/// The model dereferences to the module, whose `forward` and fields are used as before sharding. It
/// is a Burn [`Module`] itself: `optimizer.step(lr, model, grads)` returns the updated model.
///
/// Clones and [`valid`](Self::valid) snapshots share the gather buffers, so use only one of them at
/// a time.
#[derive(Clone, Debug)]
pub struct Fsdp<M> {
    pub(crate) module: M,
    pub(crate) schedule: Arc<dyn ErasedSchedule>,
    pub(crate) keys: Arc<BTreeMap<ParamIndex, Key>>,
    pub(crate) ignored: Arc<Vec<IgnoredParam>>,
    pub(super) ignored_gradients: IgnoredGradients,
    pub(super) gradient_hook: GradientHook,
    pub(crate) optimizer_check: OptimizerCheck,
    pub(crate) optimizer_states: OptimizerStates,
}

impl<M> Deref for Fsdp<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.module
    }
}

impl<M: FsdpModule> Fsdp<M> {
    /// Returns this rank's coordinates in the device mesh.
    pub(crate) fn mesh(&self) -> Mesh {
        self.schedule.mesh()
    }

    /// Returns a sharded snapshot without autodiff, for evaluation.
    ///
    /// Drop the snapshot before the next optimizer step: while it exists, the optimizer copies
    /// shards and cannot update them in place.
    #[must_use]
    pub fn valid(&self) -> Self {
        Module::valid(self)
    }
}

impl<M: Module> Fsdp<M> {
    /// Returns the model with another module, which has the same sharded parameters.
    pub(crate) fn with_module(&self, module: M) -> Self {
        Self {
            module,
            schedule: self.schedule.clone(),
            keys: self.keys.clone(),
            ignored: self.ignored.clone(),
            ignored_gradients: self.ignored_gradients.clone(),
            gradient_hook: self.gradient_hook.clone(),
            optimizer_check: self.optimizer_check.clone(),
            optimizer_states: self.optimizer_states.clone(),
        }
    }

    /// Ends a step of an optimizer in the accounting of memory.
    pub(crate) fn end_step(&self) {
        if let Some(size) = self.optimizer_states.changed() {
            self.schedule.report_optimizer(size);
        }
        self.schedule.mark_step();
    }

    /// Replaces the module by the result of `map`.
    ///
    /// # Panics
    ///
    /// Unwinds with [`ScheduleError::ChangedWhileUnsharded`](crate::errors::ScheduleError) if a unit is kept
    /// gathered.
    pub(crate) fn map_module(self, map: impl FnOnce(M) -> M) -> Self {
        let schedule = self.schedule.clone();
        self.map_placed(|module| place_shards(&*schedule, map(module)))
    }

    /// Replaces the module by the result of `map`, as [`map_module`](Self::map_module) does. `map` moves the
    /// shards to their common buffers itself.
    fn map_placed(self, map: impl FnOnce(M) -> M) -> Self {
        self.schedule.begin_change().unwrap_or_else(|error| raise(error));
        Self { module: map(self.module), ..self }
    }
}

impl<M: Module> Module for Fsdp<M> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.module.collect_devices(devices)
    }

    /// Moves the parameters to a device, as detached leaves.
    ///
    /// # Panics
    ///
    /// With the feature `train`, unwinds with
    /// [`LearnerError::NoStrategy`](crate::errors::LearnerError::NoStrategy) at several ranks, because
    /// Burn's own training strategies begin with this call; `launch` returns the error.
    fn fork(self, device: &Device) -> Self {
        #[cfg(feature = "train")]
        if self.schedule.mesh().world != WorldSize::ONE {
            raise(LearnerError::NoStrategy { world: self.schedule.mesh().world }.into());
        }
        self.map_module(|module| module.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.map_module(|module| module.to_device(device))
    }

    fn train(self) -> Self {
        self.map_module(Module::train)
    }

    fn valid(&self) -> Self {
        self.with_module(self.module.valid())
    }

    fn materialize(self) -> Self {
        let schedule = self.schedule.clone();
        // The alias of a tied weight needs the shard of the owner, so all shards are read first.
        visit_leaf(&self.module, &mut Collect(&*schedule));
        let materialized = Self { module: self.module.materialize(), ..self };
        schedule.forget();
        materialized
    }

    /// Returns the number of elements of all parameters of the full model, not of this rank's
    /// shards.
    fn num_params(&self) -> usize {
        self.stats().num_params()
    }

    /// Visits the parameters, with the shards of sharded ones.
    ///
    /// # Panics
    ///
    /// Unwinds with [`SaveError::Snapshot`](crate::errors::SaveError::Snapshot) if `burn-store` collects
    /// the tensors of the model; `launch` returns the error.
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        if type_name::<V>().starts_with("burn_store::")
            && self.schedule.units().iter().any(is_sharded)
        {
            raise(SaveError::Snapshot.into());
        }
        self.module.visit(visitor);
        self.optimizer_check.visit(visitor);
    }

    /// Maps the module, for example with an optimizer.
    ///
    /// # Panics
    ///
    /// Unwinds with the [`Error`](crate::Error) if an optimizer steps shards otherwise than whole
    /// parameters; `launch` returns the error.
    fn map<T: ModuleMapper>(self, mapper: &mut T) -> Self {
        let _span = tracing::trace_span!(target: "fsdp::trace", "fsdp::step").entered();
        let check = self.optimizer_check.clone();
        // The mapper may be an optimizer, whose steps on several parameters can share a kernel
        // launch.
        let (schedule, states) = (self.schedule.clone(), self.optimizer_states.clone());
        let map = |module: M, mapper: &mut T| {
            let place = PlaceShards::new(&*schedule, &module);
            batched_steps::scope(|| match is_of_optimizers::<T>() {
                true => {
                    let around = StepInF32::new(&*schedule, &states, &module, false);
                    let mapper = &mut Around { mapper, around };
                    module.map(&mut Around { mapper, around: place })
                }
                false => module.map(&mut Around { mapper, around: place }),
            })
        };
        let mapped = self.map_placed(|module| {
            check.map(module, mapper, &states, map).unwrap_or_else(|error| raise(error))
        });
        if is_of_optimizers::<T>() {
            mapped.end_step();
        }
        mapped
    }

    /// Gathers the full state of the unsharded model on each rank. Every rank calls it.
    ///
    /// [`save_burnpack`](crate::checkpoint::State::save_burnpack) writes the same record without
    /// gathering the full state in memory.
    ///
    /// # Panics
    ///
    /// Unwinds with the [`Error`](crate::Error) if a collective fails; `launch` returns the error.
    fn into_record(self) -> ModuleRecord {
        self.materialize().module.into_record()
    }

    /// Gathers the full parameters of a group on each rank. Every rank calls it.
    ///
    /// # Panics
    ///
    /// Unwinds with the [`Error`](crate::Error) if a collective fails; `launch` returns the error.
    fn into_record_group(self, group: ParamGroup) -> ModuleRecord {
        self.materialize().module.into_record_group(group)
    }
}

/// Returns whether a rank stores only a shard of some parameter of a unit.
fn is_sharded(unit: &Unit) -> bool {
    unit.params.iter().any(ParamSpec::is_sharded)
}
