//! The plan of a training step: memory, collectives and computation of one rank.

use super::collective::{Collective, Spread, exchanges, issued};
use super::work::{Batch, ParallelWork, Recomputation, TokenWork, UnitWork};
use crate::backend::DeviceKind;
use crate::error::ShardError;
use crate::layout::Mesh;
use crate::module::FsdpModule;
use crate::options::{ActivationCheckpointing, FsdpOptions, OffloadPolicy};
use crate::param_group::memory::MemoryForecast;
use crate::param_group::plan::shape::ModelShape;
use crate::param_group::plan::{ModelPlan, gathers};
use crate::param_group::{ParamSpec, Unit};
use crate::plan::rehearsal::{Action, Rehearsal};
use crate::runtime::schedule::Counts;
use crate::runtime::schedule::decide::Timing;

/// The training step of one rank, planned without a device, a peer or a parameter in memory.
///
/// The plan takes the decisions of the schedule that trains: the same functions decide which unit is
/// gathered ahead, which stays gathered and when a reduction is waited for. Numbers and bytes of
/// collectives are those of a real step. Units are assumed to run forward in layout order, each once
/// in a pass.
#[derive(Clone, Debug)]
pub struct StepPlan {
    pub(super) units: Vec<Unit>,
    pub(super) mesh: Mesh,
    options: FsdpOptions,
    timing: Timing,
    kind: DeviceKind,
    work: Vec<TokenWork>,
    recomputation: Recomputation,
    fused_loss: bool,
    moments: usize,
}

impl StepPlan {
    /// Plans the step of `module` on the rank of `mesh`. The device that computes is assumed to be
    /// that of the module. No parameter is initialised.
    ///
    /// Every matrix of the module counts as one that each token is multiplied with;
    /// [`with_lookups`](Self::with_lookups) and [`with_attention`](Self::with_attention) correct
    /// this.
    ///
    /// Frozen parameters have neither gradients nor reductions nor optimizer state, and frozen units
    /// before the first trained parameter have no backward. On a device without autodiff, where no
    /// parameter requires a gradient, all of them count as trained.
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
        let work = TokenWork::of_units(&units, mesh);
        Ok(Self::of_units(units, work, (mesh, DeviceKind::of(&device)), options))
    }

    /// Plans the step of a model that is given by its shapes, on the rank of `mesh`, for a GPU.
    ///
    /// The hybrid strategies need a [`shard_size`](FsdpOptions::with_shard_size).
    ///
    /// # Errors
    ///
    /// Returns [`ShardError::EmptyModel`] for a model without parameters, and the errors of the
    /// options.
    pub fn of_shape(
        shape: &ModelShape,
        mesh: Mesh,
        options: &FsdpOptions,
    ) -> Result<Self, ShardError> {
        options.check()?;
        let mesh = options.mesh(mesh, mesh.world.size())?;
        let units = shape.lay_out(mesh, options, DeviceKind::Cuda)?;
        let work = TokenWork::of_shape(shape, &units, mesh);
        Ok(Self::of_units(units, work, (mesh, DeviceKind::Cuda), options))
    }

    fn of_units(
        units: Vec<Unit>,
        work: Vec<TokenWork>,
        (mesh, kind): (Mesh, DeviceKind),
        options: &FsdpOptions,
    ) -> Self {
        let recomputation = match options.activation_checkpointing {
            ActivationCheckpointing::All => Recomputation::Units,
            _ => Recomputation::None,
        };
        Self {
            timing: Timing::new(&units, options, kind),
            options: options.clone(),
            units,
            mesh,
            kind,
            work,
            recomputation,
            fused_loss: false,
            moments: 2,
        }
    }

    /// Plans for a GPU a module that lies on Flex: two reductions may run at a time by default, and one rank
    /// computes with f32 parameters where they are.
    #[must_use]
    pub fn for_gpu(mut self) -> Self {
        self.kind = DeviceKind::Cuda;
        for unit in &mut self.units {
            unit.gathers = gathers(&unit.params, self.mesh, &self.options, self.kind);
        }
        self.timing = Timing::new(&self.units, &self.options, self.kind);
        self
    }

    /// Names matrices whose rows are looked up, by their module paths. They take no operations.
    #[must_use]
    pub fn with_lookups(mut self, paths: &[&str]) -> Self {
        for (unit, work) in self.units.iter().zip(&mut self.work) {
            let named = unit.params.iter().filter(|it| paths.contains(&&*it.path));
            let frozen = named.clone().filter(|it| !it.is_trained);
            work.remove_products(
                named.map(ParamSpec::numel).sum(),
                frozen.map(ParamSpec::numel).sum(),
            );
        }
        self
    }

    /// Sets the attention in each unit of a type: the elements of the queries of one token over all
    /// heads, and whether a token attends to earlier ones only. Default: no attention.
    #[must_use]
    pub fn with_attention(self, unit_type: &str, width: usize, is_causal: bool) -> Self {
        self.with_work_of(unit_type, |work| work.set_attention(width, is_causal))
    }

    /// Sets the activations in each unit of a type: the elements that the forward of one token saves
    /// for backward, and the elements of the unit's inputs, which a recomputed unit saves instead.
    /// Default: 0 for a module, as only the module knows what its operations save.
    #[must_use]
    pub fn with_activations(self, unit_type: &str, saved: usize, inputs: usize) -> Self {
        self.with_work_of(unit_type, |work| work.set_activations(saved, inputs))
    }

    /// Sets what tensor parallel and context parallel ranks share of the activations in each unit of a type.
    /// Default: of a module, tensor parallel ranks divide the matrices, but no activations and no attention, and the
    /// plan has no exchanges between them; context parallel ranks divide the tokens.
    #[must_use]
    pub fn with_parallel_work(self, unit_type: &str, parallel: ParallelWork) -> Self {
        self.with_work_of(unit_type, |work| work.set_parallel(parallel))
    }

    fn with_work_of(mut self, unit_type: &str, change: impl Fn(&mut TokenWork)) -> Self {
        let units = self.units.iter().zip(&mut self.work);
        units.filter(|(unit, _)| unit.ty == unit_type).for_each(|(_, work)| change(work));
        self
    }

    /// Says that units repeat every second matrix product in backward, in place of none.
    #[must_use]
    pub fn with_selective_recomputation(mut self) -> Self {
        self.recomputation = Recomputation::Selective;
        self
    }

    /// Sets whether the loss is computed in parts, without the logits in memory, as
    /// [`linear_cross_entropy`](crate::nn::linear_cross_entropy) does. Default: no.
    #[must_use]
    pub const fn with_fused_loss(mut self, fused: bool) -> Self {
        self.fused_loss = fused;
        self
    }

    /// Sets the number of f32 values that the optimizer keeps for each element: 2 for Adam and
    /// AdamW, 1 for SGD with momentum. Default: 2.
    #[must_use]
    pub const fn with_optimizer(mut self, moments: usize) -> Self {
        self.moments = moments;
        self
    }

    /// Returns the number of elements of all parameters. A tied weight counts once.
    pub fn num_params(&self) -> usize {
        self.units.iter().map(Unit::num_params).sum()
    }

    /// Returns this rank's coordinates in the device mesh.
    pub const fn mesh(&self) -> Mesh {
        self.mesh
    }

    pub(super) fn offloads(&self) -> bool {
        self.timing.offloads
    }

    pub(super) const fn moments(&self) -> usize {
        self.moments
    }

    /// Returns how much of the forward is repeated in backward.
    pub const fn recomputation(&self) -> Recomputation {
        self.recomputation
    }

    /// Returns the module paths of the units, in layout order; that of the outermost one is empty.
    pub fn units(&self) -> impl ExactSizeIterator<Item = &str> {
        self.units.iter().map(|unit| &*unit.path)
    }

    /// Returns the actions of a step, and their counts.
    pub(super) fn actions(&self, micro_batches: usize) -> (Vec<Action>, Counts) {
        let keeps_sent = self.options.offload == OffloadPolicy::OptimizerOnly;
        let timing = self.timing.clone();
        Rehearsal::new(&self.units, timing, self.mesh, keeps_sent).step(micro_batches)
    }

    /// Returns the counts by which [`Stats::counts`](crate::model::Stats::counts) grows in a step of
    /// `micro_batches` micro-batches. Those of `fusion` and of single gathers are 0.
    pub fn counts(&self, micro_batches: usize) -> Counts {
        self.actions(micro_batches).1
    }

    /// Returns the order of a step of `micro_batches` micro-batches, a line for each action: its
    /// name, as the traces of training have it, and the unit's path.
    pub fn order(&self, micro_batches: usize) -> Vec<String> {
        let line = |action: &Action| {
            let (name, unit) = match *action {
                Action::Gather { unit, .. } => ("unshard", unit),
                Action::AwaitGather { unit } => ("wait_for_unshard", unit),
                Action::Reshard { unit } => ("reshard", unit),
                Action::Reduce { unit, .. } => ("reduce", unit),
                Action::AwaitReduce { unit } => ("wait_for_reduce", unit),
                Action::Compute { .. } | Action::Gradients { .. } => return None,
            };
            Some(format!("{name} {}", self.units[unit].name.replace('`', "")))
        };
        self.actions(micro_batches).0.iter().filter_map(line).collect()
    }

    /// Returns the collectives of a step, in the order in which they are issued, on machines of
    /// `per_machine` devices.
    pub fn collectives(&self, micro_batches: usize, per_machine: usize) -> Vec<Collective> {
        let mut collectives = Vec::new();
        for action in self.actions(micro_batches).0 {
            for issued in issued(&action) {
                let spread = Spread::new(issued.peers, self.mesh, per_machine);
                let (inside, between) = spread.traffic(issued.operation, issued.bytes);
                collectives.push(Collective {
                    operation: issued.operation,
                    unit: self.units[issued.unit].path.clone(),
                    ranks: spread.ranks(),
                    bytes: issued.bytes,
                    ahead: issued.ahead,
                    inside,
                    between,
                });
            }
        }
        collectives
    }

    /// Returns the exchanges of activations and their gradients in a step, among tensor parallel and context
    /// parallel ranks, on machines of `per_machine` devices. Those of a module that is not given by its shapes are
    /// not known. The loss of a split head, which exchanges a few numbers of each row, is not counted.
    pub fn activation_collectives(&self, batch: Batch, per_machine: usize) -> Vec<Collective> {
        let work = self.work(batch);
        let mut collectives = Vec::new();
        for action in self.actions(batch.micro_batches).0 {
            let Action::Compute { unit, part } = action else { continue };
            for (operation, peers, bytes) in
                exchanges(&work[unit], part, self.mesh, self.recomputation)
            {
                let spread = Spread::new(peers, self.mesh, per_machine);
                let (inside, between) = spread.traffic(operation, bytes);
                let (path, ranks) = (self.units[unit].path.clone(), spread.ranks());
                let (unit, ahead) = (path, false);
                collectives.push(Collective {
                    operation,
                    unit,
                    ranks,
                    bytes,
                    ahead,
                    inside,
                    between,
                });
            }
        }
        collectives
    }

    /// Returns the computation of each unit for one micro-batch, in layout order.
    pub fn work(&self, batch: Batch) -> Vec<UnitWork> {
        self.work.iter().map(|work| work.of(batch, self.fused_loss)).collect()
    }

    /// Returns the memory of a rank, with the state of the optimizer and without activations.
    pub fn memory(&self, micro_batches: usize) -> MemoryForecast {
        let forecast = MemoryForecast::of_units(&self.units, &self.options, self.kind);
        let forecast = forecast.with_optimizer(self.moments);
        if micro_batches > 1 { forecast.with_accumulation() } else { forecast }
    }
}
