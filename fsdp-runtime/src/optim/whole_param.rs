//! Optimizer steps on full matrices, for models whose parameters are sharded.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::tensor::Tensor;

use super::matrix_step::{MatrixStep, PutShards, TakeMatrices, rounds};
use super::owners::owners;
use crate::error::{Error, ScheduleError};
use crate::fully_shard::Fsdp;
use crate::fully_shard::around_float::Around;
use crate::fully_shard::step_in_f32::StepInF32;
use crate::layout::Rank;
use crate::module::{FsdpModule, ParamIndex, ParamVisitor, Sharded};
use crate::param_group::memory::reported;
use crate::param_group::{Placement, Unit};

/// Steps a sharded model with an optimizer that needs full matrices, such as Burn's LAMB, Adafactor
/// and Muon. The result is that of the unsharded model.
///
/// Element-wise optimizers, such as SGD and Adam, step shards directly and do not need this
/// wrapper.
///
/// # Cost
///
/// Each sharded matrix has an owner, a rank of the shard group. Owners are balanced by bytes and
/// depend only on the layout. A step gathers a matrix and its gradient on the owner, updates the
/// matrix there with Burn's optimizer, and scatters the new shards. All owners work at the same
/// time, and each stores one full matrix and its gradient in addition to its shards. Every rank
/// steps replicated parameters (vectors, and all parameters under `NO_SHARD`) by itself.
///
/// # Compatibility
///
/// Parameter groups, learning rates and gradient clipping of the optimizer work as they do without
/// sharding: clipping by norm uses the norm of the full gradient.
///
/// The optimizer state of a matrix is stored only on the owner. A
/// [checkpoint](crate::checkpoint::Checkpoint::with_whole_optimizer) stores it under the name of
/// the parameter, and can be loaded with any number of ranks and any strategy. A record contains
/// the state of one rank, and can be loaded with the same number of ranks, strategy and wrapping
/// only.
///
/// # Examples
///
/// ```no_run
/// # use burn::optim::{GradientsParams, MuonConfig, AdamWConfig};
/// # use burn::module::ParamGroup;
/// # use fsdp_runtime::{Error, Fsdp, FsdpModule, optim::WholeParam};
/// # fn step<M: FsdpModule>(model: Fsdp<M>, gradients: GradientsParams) -> Result<Fsdp<M>, Error> {
/// // Muon steps the matrices of the blocks, and AdamW all other parameters.
/// let blocks = ParamGroup::from_regex(r"^blocks\..*\.weight$").expect("a valid pattern");
/// let optimizer = AdamWConfig::new().init().with_group(blocks, MuonConfig::new().build(), None);
/// let mut optimizer = WholeParam::new(optimizer);
/// let model = optimizer.step(1e-3, model, gradients)?;
/// # Ok(model)
/// # }
/// ```
#[derive(Clone)]
pub struct WholeParam {
    inner: ModuleOptimizer,
}

impl fmt::Debug for WholeParam {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WholeParam").finish_non_exhaustive()
    }
}

impl WholeParam {
    /// Wraps an optimizer, with or without state.
    pub fn new(optimizer: impl Into<ModuleOptimizer>) -> Self {
        Self { inner: optimizer.into() }
    }

    /// Updates the parameters that have a gradient, and returns the updated model. Every rank calls
    /// it.
    ///
    /// # Errors
    ///
    /// [`ScheduleError::GradientMismatch`] if a rank has no gradient of a parameter that has one on
    /// other ranks, and [`CollectiveError`](crate::errors::CollectiveError) if another rank fails or does
    /// not take part within the time-out. The model is lost in both cases.
    ///
    /// # Panics
    ///
    /// Panics if the optimizer does, as Muon does on a parameter that is not a matrix.
    pub fn step<M: FsdpModule>(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        model: Fsdp<M>,
        mut gradients: GradientsParams,
    ) -> Result<Fsdp<M>, Error> {
        let _span = tracing::trace_span!(target: "fsdp::trace", "fsdp::step").entered();
        let (lr, schedule) = (lr.into(), model.schedule.clone());
        let instead = "use an optimizer that steps each element, such as AdamW";
        schedule.check_whole("`WholeParam`", instead)?;
        let states = model.optimizer_states.clone();
        let sharded = sharded_with_gradient(&model, &gradients)?;
        let mut take = TakeMatrices::new(&mut self.inner, &lr, &mut gradients, sharded);
        let model = model.map_module(|module| {
            let around = StepInF32::new(&*schedule, &states, &module, true);
            module.map(&mut Around { mapper: &mut take, around })
        });
        let matrices = take.into_matrices();
        let mut updated = HashMap::new();
        for round in rounds(&*schedule, matrices) {
            let (steps, wholes): (Vec<_>, Vec<_>) = round.into_iter().unzip();
            // A rank has no state of the matrices that other ranks own.
            steps.iter().for_each(|step| states.set(step.id, Some(0)));
            let mut step = |index: usize, matrix, gradient| {
                let MatrixStep { id, path, step, .. } = &steps[index];
                let step = || step(&mut self.inner, &lr, *id, path, matrix, gradient);
                let (matrix, bytes) = reported(step);
                states.replace(*id, bytes);
                matrix
            };
            let shards = schedule.step_whole(wholes, &mut step)?;
            for (MatrixStep { id, .. }, shard) in steps.into_iter().zip(shards) {
                updated.extend(shard.map(|shard| (id, shard)));
            }
        }
        let model = model.map_module(|module| module.map(&mut PutShards { updated }));
        model.end_step();
        Ok(model)
    }

    /// Returns the rank that owns each sharded matrix of `model`, by module path. Under a hybrid
    /// strategy, these are ranks of this rank's shard group.
    pub fn owners<M: FsdpModule>(model: &Fsdp<M>) -> BTreeMap<String, Rank> {
        let (units, mesh) = (model.schedule.units(), model.mesh());
        let first = mesh.replica().index() * mesh.shard_size().size();
        let group: Vec<Rank> = mesh.world.ranks().skip(first).collect();
        let owners = owners(units, mesh).into_iter();
        let path = |index| model.schedule.spec(index).path.clone();
        owners.map(|(index, owner)| (path(index), group[owner])).collect()
    }

    /// Returns the optimizer with this rank's state: full tensors of replicated parameters, and of
    /// the matrices that the rank owns.
    pub fn inner(&self) -> &ModuleOptimizer {
        &self.inner
    }

    /// Returns the optimizer, to load this rank's state into it.
    pub(crate) fn inner_mut(&mut self) -> &mut ModuleOptimizer {
        &mut self.inner
    }

    /// Unwraps the optimizer, with this rank's state.
    pub fn into_inner(self) -> ModuleOptimizer {
        self.inner
    }

    /// Returns a record of this rank's state.
    pub fn to_record(&self) -> OptimizerRecord {
        self.inner.to_record()
    }

    /// Loads a record of this rank's state.
    #[must_use]
    pub fn load_record(self, record: OptimizerRecord) -> Self {
        Self { inner: self.inner.load_record(record) }
    }
}

/// Returns the sharded matrices that have a gradient on any rank. Every rank calls it, and gets the
/// same matrices.
fn sharded_with_gradient<M: FsdpModule>(
    model: &Fsdp<M>,
    gradients: &GradientsParams,
) -> Result<HashMap<ParamId, ParamIndex>, Error> {
    let (units, mesh) = (model.schedule.units(), model.mesh());
    let mut find = FindGradients { units, gradients, matrices: Vec::new(), lens: Vec::new() };
    model.visit_params(&mut find);
    let all = model.schedule.exchange_gradients(find.lens)?;
    let mut found = HashMap::new();
    for (number, (id, index)) in find.matrices.into_iter().enumerate() {
        if all.iter().all(|lens| lens[number].is_none()) {
            continue;
        }
        let unit = &units[index.unit];
        let entry = &unit.params[index.param];
        let segment = entry.segment.expect("a sharded entry has a segment");
        for (rank, lens) in mesh.shard_size().ranks().zip(&all) {
            let expected = unit.layout.shard_of(segment, rank).len();
            if expected == 0 || lens[number] == Some(expected) {
                continue;
            }
            let found = lens[number].map_or("none".into(), |len| format!("one of {len}"));
            let path = entry.path.clone();
            return Err(ScheduleError::GradientMismatch { path, rank, expected, found }.into());
        }
        found.insert(id, index);
    }
    Ok(found)
}

/// The visitor that lists the sharded matrices and their gradients on this rank.
struct FindGradients<'a> {
    units: &'a [Unit],
    gradients: &'a GradientsParams,
    matrices: Vec<(ParamId, ParamIndex)>,
    /// Number of elements of each matrix's gradient; `None` for no gradient.
    lens: Vec<Option<usize>>,
}

impl ParamVisitor for FindGradients<'_> {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(index) = Sharded::of(param).map(|sharded| sharded.index) else { return };
        let entry = &self.units[index.unit].params[index.param];
        if matches!(entry.placement, Placement::Shard(_)) {
            let gradient = self.gradients.get::<D>(param.id);
            self.lens.push(gradient.map(|gradient| gradient.shape().num_elements()));
            self.matrices.push((param.id, index));
        }
    }
}
