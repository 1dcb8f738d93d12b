//! The mapper that replaces a module's parameters by the parts that this rank stores.

use std::collections::HashMap;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, DispatchTensor, Shape, Tensor};

use super::super::place_shards::placed;
use super::broadcasts::{Broadcast, Broadcasts, Received};
use super::checks::Checks;
use super::init_owners::InitOwners;
use super::param_value::{EmptyParam, initialise, part};
use super::running_stats;
use super::setup::InitSetup;
use super::small_params::{ReplacePlaceholders, SmallParams, is_small};
use crate::backend::{ModelBackend, Raw, RawFloat, ShardBackend, StoredTensor};
use crate::error::{Error, ShardError};
use crate::launch::agree::{OnError, agree_result};
use crate::module::{
    Child, FsdpModule, ModulePath, ParamIndex, ParamMapper, RandomSource, Sharded,
};
use crate::param_group::plan::SHARDED;
use crate::param_group::{ParamSpec, Placement, Unit};
use crate::runtime::schedule::ScheduleShards;

/// Replaces a module's parameters by the parts that this rank stores.
pub(in crate::fully_shard) struct ShardingInit<'a, B: ModelBackend> {
    setup: InitSetup<'a, B>,
    progress: Progress,
    transfers: Transfers<Raw<B>>,
    checks: Checks,
}

/// The position in the traversal, and the number of elements done.
struct Progress {
    /// Segments of the module path.
    path: ModulePath,
    /// Number of parameters that the traversal has reached.
    visited: usize,
    /// Number of these parameters that are not ignored.
    managed: usize,
    /// Number of elements of the parameters that are initialised or received.
    initialized: usize,
    /// Number of elements of all parameters.
    all: usize,
}

/// Values that are sent and received.
struct Transfers<B: ShardBackend> {
    /// Assignment of parameters to the ranks that initialise them.
    owners: InitOwners,
    /// Broadcasts that were issued.
    broadcasts: Broadcasts<B>,
    /// Small replicated parameters of each unit, which are broadcast together.
    small: Vec<SmallParams<B>>,
    /// Received values, which replace the placeholders in the model at the end.
    received: HashMap<ParamId, DispatchTensor>,
}

impl<'a, B: ModelBackend> ShardingInit<'a, B> {
    /// Returns a mapper for the model of `setup`.
    pub(in crate::fully_shard) fn new(setup: InitSetup<'a, B>, owners: InitOwners) -> Self {
        let units = &setup.plan.units;
        let small = |(index, unit): (usize, &Unit)| {
            let later =
                |entry| setup.loaded_later.contains(&ParamIndex { unit: index, param: entry });
            SmallParams::new(unit, |entry| is_small(&unit.params[entry]) && !later(entry))
        };
        let small = units.iter().enumerate().map(small).collect();
        let largest_unit = units.iter().map(Unit::num_params).max().unwrap_or(0);
        let all = units.iter().map(Unit::num_params).sum();
        Self {
            setup,
            progress: Progress {
                path: ModulePath::default(),
                visited: 0,
                managed: 0,
                initialized: 0,
                all,
            },
            transfers: Transfers {
                owners,
                broadcasts: Broadcasts::new(largest_unit),
                small,
                received: HashMap::new(),
            },
            checks: Checks::default(),
        }
    }

    /// Completes the initialisation of `module`, which this mapper has mapped: reports errors, puts
    /// received values in place of placeholders, and compares checksums. Every rank calls it.
    pub(in crate::fully_shard) fn finish<M: FsdpModule>(mut self, module: M) -> Result<M, Error> {
        self.receive_pending(None);
        if let Some(error) = self.checks.take_failed_collective() {
            return Err(error);
        }
        let Self { setup, transfers, mut checks, .. } = self;
        let initialised = checks.take_wrong_param();
        agree_result(setup.worker.comm(), "the initialisation", initialised, OnError::FailWorld)?;
        if !setup.options.sync_module_states {
            checks.compare_checksums(setup.worker, setup.plan)?;
            return Ok(module);
        }
        let mut replace = ReplacePlaceholders(transfers.received);
        let module = if replace.0.is_empty() { module } else { module.map(&mut replace) };
        assert!(replace.0.is_empty(), "every received value has replaced its placeholder");
        running_stats::broadcast(setup.worker, &setup.plan.ignored, module)
    }

    /// Counts a parameter as initialised, and reports the progress to `tracing`.
    fn log_initialized(&mut self, index: ParamIndex) {
        let spec = self.setup.spec(index);
        self.progress.initialized += spec.numel();
        tracing::trace!(
            target: "fsdp::init",
            rank = self.setup.rank(),
            path = spec.path.as_str(),
            done = self.progress.initialized,
            all = self.progress.all,
            "fsdp::shard"
        );
    }

    /// Waits for running broadcasts, and stores the values that they bring.
    ///
    /// With `room_for`, waits only until a tensor of that many elements may be queued. Otherwise
    /// waits for all broadcasts.
    fn receive_pending(&mut self, room_for: Option<usize>) {
        while let Some(received) = self.transfers.broadcasts.next(room_for) {
            match received {
                Ok(Received { index, values }) => {
                    index.into_iter().for_each(|index| self.log_initialized(index));
                    let place = |(id, value)| {
                        let value = self.setup.device.stored(value);
                        let placed = index
                            .and_then(|index| self.setup.schedule.placed(index, value.clone()));
                        (id, placed.unwrap_or(value))
                    };
                    self.transfers.received.extend(values.into_iter().map(place));
                }
                Err(error) => self.checks.record_failed_collective(error.into()),
            }
        }
    }

    /// Returns a parameter without its value, and the tensor that this rank stores for it.
    fn shard<const D: usize>(
        &mut self,
        param: Param<Tensor<D>>,
        index: ParamIndex,
        number: usize,
    ) -> (EmptyParam<D>, RawFloat<B>) {
        let device = &self.setup.device;
        let spec = self.setup.spec(index);
        if matches!(spec.placement, Placement::TiedTo(_)) {
            return (device.empty(param), device.filled_base(spec, 0.0));
        }
        if self.setup.loaded_later.contains(&index) {
            // NaN shows where a parameter is used without being loaded.
            return (device.empty(param), device.filled_base(spec, f32::NAN));
        }
        let root = match is_small(spec) {
            true => 0,
            false => self.transfers.owners.assign(index, spec.whole_numel()),
        };
        if self.setup.receives(&param, root) {
            let empty = device.empty(param);
            let base = self.base(index, empty.id, None, root);
            return (empty, base);
        }
        self.receive_pending(Some(spec.whole_numel()));
        let (id, tensor, mapper) = initialise(param, self.setup.options.seed, number);
        let requires_grad = tensor.is_require_grad();
        let full = self.full(index, tensor);
        let base = self.base(index, id, Some(full), root);
        (EmptyParam { id, requires_grad, mapper }, base)
    }

    /// Returns the tensor that this rank stores for a parameter. `full` is the full parameter, or
    /// `None` where this rank receives it from rank `root`.
    fn base(
        &mut self,
        index: ParamIndex,
        id: ParamId,
        full: Option<RawFloat<B>>,
        root: usize,
    ) -> RawFloat<B> {
        let spec = self.setup.spec(index);
        if !self.setup.options.sync_module_states {
            let device = &self.setup.device;
            let full = full.unwrap_or_else(|| device.filled(&spec.whole_shape(), 0.0));
            self.log_initialized(index);
            self.checks.add_checksum::<Raw<B>>(index, &full);
            let device = &self.setup.device.backend;
            return part::<Raw<B>>(full, spec, device);
        }
        let value = full.filter(|_| self.setup.rank() == root);
        if is_small(spec) {
            self.log_initialized(index);
            self.add_small(index, id, value)
        } else {
            self.broadcast(index, id, value)
        }
    }

    /// Broadcasts a parameter from the rank that passes `value`. Returns a placeholder of one
    /// element, which the received part replaces at the end.
    fn broadcast(
        &mut self,
        index: ParamIndex,
        id: ParamId,
        value: Option<RawFloat<B>>,
    ) -> RawFloat<B> {
        let spec = self.setup.spec(index);
        let sending = value.as_ref().map_or(0, |_| spec.whole_numel());
        let own = spec.clone();
        let (device, storage) = (self.setup.device.backend.clone(), self.setup.device.storage);
        // Drops the full parameter before the next one is received.
        let keep = move |full| {
            let part = part::<Raw<B>>(full, &own, &device);
            vec![(id, StoredTensor::<Raw<B>>::store(part, storage))]
        };
        let values = self.setup.broadcast(spec.path.as_str(), spec.whole_numel(), value, keep);
        self.transfers.broadcasts.push(Broadcast { index: Some(index), sending, values });
        self.placeholder(spec)
    }

    /// Adds a small replicated parameter to those of its unit, and broadcasts them if they are
    /// complete. Returns `value` on rank 0, and a placeholder of one element on the other ranks.
    fn add_small(
        &mut self,
        index: ParamIndex,
        id: ParamId,
        value: Option<RawFloat<B>>,
    ) -> RawFloat<B> {
        let spec = self.setup.spec(index);
        let device = &self.setup.device.backend;
        let shape = Shape::from(spec.whole_shape());
        let value = value.map(|full| Raw::<B>::copy_range(full, 0..spec.whole_numel(), shape));
        let store = |value| part::<Raw<B>>(value, spec, device);
        let base = value.clone().map(store);
        if let Some(complete) = self.transfers.small[index.unit].add(id, spec, value) {
            self.broadcast_small(&self.setup.plan.units[index.unit].name, complete);
        }
        base.unwrap_or_else(|| self.placeholder(spec))
    }

    /// Broadcasts the small parameters of a unit from rank 0.
    fn broadcast_small(&mut self, unit: &str, mut small: SmallParams<Raw<B>>) {
        let sends = self.setup.rank() == 0;
        let packed = sends.then(|| small.pack(&self.setup.device.backend));
        let (numel, storage) = (small.numel(), self.setup.device.storage);
        let device = self.setup.device.backend.clone();
        let keep = move |packed| match sends {
            true => Vec::new(),
            false => {
                let values = small.unpack(packed, &device);
                values
                    .map(|(id, value)| (id, StoredTensor::<Raw<B>>::store(value, storage)))
                    .collect()
            }
        };
        let what = format!("the small parameters of {unit}");
        let values = self.setup.broadcast(&what, numel, packed, keep);
        self.transfers.broadcasts.push(Broadcast { index: None, sending: 0, values });
    }

    /// Returns a tensor of one element, with as many dimensions as a parameter.
    fn placeholder(&self, spec: &ParamSpec) -> RawFloat<B> {
        self.setup.device.filled(&vec![1; spec.shape.len()], 0.0)
    }

    /// Returns the full parameter on the device. A wrong shape or dtype is recorded, and zeros take
    /// the parameter's place, so that this rank can take part in the collectives that follow.
    fn full<const D: usize>(&mut self, index: ParamIndex, tensor: Tensor<D>) -> RawFloat<B> {
        let spec = self.setup.spec(index);
        let shape = &spec.whole_shape();
        let (path, declared, found) = (spec.path.clone(), shape.clone(), tensor.shape().to_vec());
        let dtype = tensor.dtype();
        let device = &self.setup.device;
        let wrong = match StoredTensor::<B>::from_dispatch(tensor.into_dispatch(), device.storage) {
            Some((value, ..)) if SHARDED.contains(&dtype) && found == declared => {
                let buffer = value.lower_one();
                return buffer.on_device(&device.backend, DType::F32, device.storage);
            }
            Some(_) if SHARDED.contains(&dtype) => ShardError::InitShape { path, declared, found },
            _ => ShardError::UnsupportedDtype { path, dtype },
        };
        self.checks.record_wrong_param(wrong);
        device.filled(shape, 0.0)
    }
}

impl<B: ModelBackend> ParamMapper for ShardingInit<'_, B> {
    fn enter(&mut self, child: &'static Child, index: Option<usize>) {
        self.progress.path.enter(child, index);
    }

    fn exit(&mut self) {
        self.progress.path.exit();
    }

    fn param<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.checks.has_failed() {
            return param;
        }
        let number = self.progress.visited;
        self.progress.visited += 1;
        let Some(index) = self.setup.plan.indices[number] else { return self.unmanaged(param) };
        // Seeds derive from the number among managed parameters: ranks may differ in ignored ones.
        let number = self.progress.managed;
        self.progress.managed += 1;
        let (empty, base) = self.shard(param, index, number);
        let base = self.setup.device.tensor::<D>(base).set_require_grad(empty.requires_grad);
        let param = Param::from_mapped_value(empty.id, base, empty.mapper);
        let param = placed(&*self.setup.schedule, index, param);
        Sharded::new(self.setup.schedule.clone(), index).put_on(param)
    }

    fn unmanaged<M: Module>(&mut self, module: M) -> M {
        let compute = &self.setup.device.compute;
        match self.setup.plan.device == *compute {
            true => module,
            // `to_device` would make a parameter a non-leaf of the autodiff graph.
            false => module.fork(compute),
        }
    }

    fn random_source<R: RandomSource>(&mut self, source: R) -> R {
        let path = &self.progress.path;
        source.with_stream(self.setup.random, &path.join(&[]), path.split())
    }
}
