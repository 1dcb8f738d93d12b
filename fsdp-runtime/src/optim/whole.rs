//! Optimizers that need whole matrices, on models whose parameters are shards.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Device, DispatchTensor, Tensor};

use crate::error::{Error, ScheduleError};
use crate::fully_shard::Fsdp;
use crate::layout::{Mesh, Rank};
use crate::module::{FsdpModule, ParamVisitor};
use crate::module::{ParamIndex, Sharded};
use crate::param_group::{Placement, Unit};
use crate::runtime::schedule::{Engine, Whole};

/// Steps a sharded model with an optimizer that looks at a matrix as a whole, such as Burn's LAMB,
/// Adafactor and Muon: the result is the unsharded one. Element-wise optimizers (SGD, Adam and their
/// like) need it not.
///
/// Each sharded matrix has an owner, a rank of its shard group; owners are balanced by bytes, and
/// follow from the layout alone. A step gathers a matrix and its gradient on the owner, updates it
/// there with Burn's optimizer, and sends the shards back. All owners step at once, each holding
/// one whole matrix and its gradient beside what it holds anyway. What every rank holds whole
/// (vectors, and everything under `NO_SHARD`) is stepped by every rank alike.
///
/// Parameter groups, learning rates and gradient clipping of the optimizer work as unsharded:
/// clipping by norm sees the norm of the whole gradient.
///
/// The state of a matrix is whole and lies on its owner alone, so that ranks share it out. A
/// [checkpoint](crate::checkpoint::Checkpoint::with_whole_optimizer) holds it by name, and gives it to the
/// owners of whatever world and strategy loads it. A record is this rank's; it fits again on the same
/// number of ranks, under the same strategy and wrapping.
///
/// ```no_run
/// # use burn::optim::{GradientsParams, MuonConfig, AdamWConfig};
/// # use burn::module::ParamGroup;
/// # use fsdp_runtime::{Error, Fsdp, FsdpModule, optim::WholeParam};
/// # fn step<M: FsdpModule>(model: Fsdp<M>, gradients: GradientsParams) -> Result<Fsdp<M>, Error> {
/// // Muon takes matrices alone: it gets those of the blocks, AdamW the rest.
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

impl WholeParam {
    /// Wraps an optimizer, with or without state.
    pub fn new(optimizer: impl Into<ModuleOptimizer>) -> Self {
        Self { inner: optimizer.into() }
    }

    /// Updates the parameters that have a gradient. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`ScheduleError::GradientMismatch`] where a rank lacks a gradient that others have, and
    /// [`CollectiveError`](crate::CollectiveError) when a rank does not come. The model is lost with
    /// either.
    ///
    /// # Panics
    ///
    /// Where the optimizer does, such as Muon on a parameter that is no matrix.
    pub fn step<M: FsdpModule>(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        model: Fsdp<M>,
        mut gradients: GradientsParams,
    ) -> Result<Fsdp<M>, Error> {
        let (lr, engine) = (lr.into(), model.engine.clone());
        let places = sharded_with_gradient(&model, &gradients)?;
        let mut take = Take {
            optimizer: &mut self.inner,
            lr: &lr,
            gradients: &mut gradients,
            places,
            path: Vec::new(),
            matrices: Vec::new(),
        };
        let model = model.map_module(|module| module.map(&mut take));
        let matrices = take.matrices;
        let mut updated = HashMap::new();
        for round in rounds(&*engine, matrices) {
            let (steps, wholes): (Vec<_>, Vec<_>) = round.into_iter().unzip();
            let mut step = |index: usize, matrix, gradient| {
                let MatrixStep { id, path, step, .. } = &steps[index];
                step(&mut self.inner, &lr, *id, path, matrix, gradient)
            };
            let shards = engine.step_whole(wholes, &mut step)?;
            for (MatrixStep { id, .. }, shard) in steps.into_iter().zip(shards) {
                updated.extend(shard.map(|shard| (id, shard)));
            }
        }
        Ok(model.map_module(|module| module.map(&mut Put { updated })))
    }

    /// The rank that owns each sharded matrix of `model`, by path: among those that share one copy
    /// of the parameters with this rank.
    pub fn owners<M: FsdpModule>(model: &Fsdp<M>) -> BTreeMap<String, Rank> {
        let (units, mesh) = (model.engine.units(), model.mesh());
        let first = mesh.replica().index() * mesh.shard_size().size();
        let group: Vec<Rank> = mesh.world.ranks().skip(first).collect();
        let path = |place: ParamIndex| units[place.unit].entries[place.entry].path.clone();
        let owners = owners(units, mesh).into_iter();
        owners.map(|(place, owner)| (path(place), group[owner])).collect()
    }

    /// The optimizer, with this rank's state: whole tensors, of what it owns or every rank holds.
    pub fn inner(&self) -> &ModuleOptimizer {
        &self.inner
    }

    /// The optimizer, to put this rank's state into.
    pub(crate) fn inner_mut(&mut self) -> &mut ModuleOptimizer {
        &mut self.inner
    }

    /// The optimizer, with this rank's state.
    pub fn into_inner(self) -> ModuleOptimizer {
        self.inner
    }

    /// This rank's state.
    pub fn to_record(&self) -> OptimizerRecord {
        self.inner.to_record()
    }

    /// With the state that this rank had.
    #[must_use]
    pub fn load_record(self, record: OptimizerRecord) -> Self {
        Self { inner: self.inner.load_record(record) }
    }
}

/// The sharded matrices that have a gradient, on this rank or another: all ranks find the same.
fn sharded_with_gradient<M: FsdpModule>(
    model: &Fsdp<M>,
    gradients: &GradientsParams,
) -> Result<HashMap<ParamId, ParamIndex>, Error> {
    struct Find<'a> {
        units: &'a [Unit],
        gradients: &'a GradientsParams,
        places: Vec<(ParamId, ParamIndex)>,
        lens: Vec<Option<usize>>,
    }
    impl ParamVisitor for Find<'_> {
        fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let Some(place) = Sharded::of(param).map(|sharded| sharded.place) else { return };
            let entry = &self.units[place.unit].entries[place.entry];
            if matches!(entry.held, Placement::Shard(_)) {
                let gradient = self.gradients.get::<D>(param.id);
                self.lens.push(gradient.map(|gradient| gradient.shape().num_elements()));
                self.places.push((param.id, place));
            }
        }
    }
    let (units, mesh) = (model.engine.units(), model.mesh());
    let mut find = Find { units, gradients, places: Vec::new(), lens: Vec::new() };
    model.visit_params(&mut find);
    let all = model.engine.exchange_gradients(find.lens)?;
    let mut found = HashMap::new();
    for (index, (id, place)) in find.places.into_iter().enumerate() {
        if all.iter().all(|lens| lens[index].is_none()) {
            continue;
        }
        let unit = &units[place.unit];
        let entry = &unit.entries[place.entry];
        let segment = entry.segment.expect("a sharded entry has a segment");
        for (rank, lens) in mesh.shard_size().ranks().zip(&all) {
            let expected = unit.layout.shard_of(segment, rank).len();
            if expected == 0 || lens[index] == Some(expected) {
                continue;
            }
            let found = lens[index].map_or("none".into(), |len| format!("one of {len}"));
            let path = entry.path.clone();
            return Err(ScheduleError::GradientMismatch { path, rank, expected, found }.into());
        }
        found.insert(id, place);
    }
    Ok(found)
}

/// The owner of each sharded matrix, as a position in its shard group: the largest first, each to
/// who has the fewest elements so far.
pub(crate) fn owners(units: &[Unit], mesh: Mesh) -> HashMap<ParamIndex, usize> {
    let mut matrices = Vec::new();
    for (index, unit) in units.iter().enumerate() {
        for (entry, held) in unit.entries.iter().enumerate() {
            if matches!(held.held, Placement::Shard(_)) {
                matrices.push((Reverse(held.numel()), ParamIndex { unit: index, entry }));
            }
        }
    }
    matrices.sort_unstable();
    let mut loads = vec![0; mesh.shard_size().size()];
    let own = |(Reverse(numel), place)| {
        let owner = (0..loads.len()).min_by_key(|&rank| loads[rank]).unwrap_or(0);
        loads[owner] += numel;
        (place, owner)
    };
    matrices.into_iter().map(own).collect()
}

/// The matrices in rounds of one an owner, the largest first.
fn rounds(engine: &dyn Engine, matrices: Vec<Matrix>) -> Vec<Vec<(MatrixStep, Whole)>> {
    let (units, mesh) = (engine.units(), engine.mesh());
    let owners = owners(units, mesh);
    let numel = |place: ParamIndex| units[place.unit].entries[place.entry].numel();
    let mut queues: Vec<Vec<_>> = mesh.shard_size().ranks().map(|_| Vec::new()).collect();
    for Matrix { place, step, shard, gradient } in matrices {
        let owner = owners[&place];
        queues[owner].push((step, Whole { place, owner, shard, gradient }));
    }
    let mut rounds: Vec<Vec<_>> = Vec::new();
    for mut queue in queues {
        queue.sort_by_key(|(_, whole)| (Reverse(numel(whole.place)), whole.place));
        rounds.resize_with(rounds.len().max(queue.len()), Vec::new);
        for (round, matrix) in rounds.iter_mut().zip(queue) {
            round.push(matrix);
        }
    }
    rounds
}

/// A matrix taken out of the model.
struct Matrix {
    place: ParamIndex,
    step: MatrixStep,
    shard: DispatchTensor,
    gradient: Option<DispatchTensor>,
}

/// How a matrix is stepped, once it is whole.
struct MatrixStep {
    id: ParamId,
    path: Vec<String>,
    step: StepMatrix,
}

/// [`step_matrix`] for the number of dimensions.
type StepMatrix = fn(
    &mut ModuleOptimizer,
    &ModuleLearningRate,
    ParamId,
    &[String],
    DispatchTensor,
    DispatchTensor,
) -> DispatchTensor;

fn step_matrix<const D: usize>(
    optimizer: &mut ModuleOptimizer,
    lr: &ModuleLearningRate,
    id: ParamId,
    path: &[String],
    matrix: DispatchTensor,
    gradient: DispatchTensor,
) -> DispatchTensor {
    let param = Param::initialized(id, Tensor::<D>::from_inner(Tensor::from_dispatch(matrix)));
    let gradient = Tensor::from_dispatch(gradient);
    step_param(optimizer, lr, path, param, gradient).into_value().inner().into_dispatch()
}

/// Steps one parameter of a module, found there under `path`.
fn step_param<const D: usize>(
    optimizer: &mut ModuleOptimizer,
    lr: &ModuleLearningRate,
    path: &[String],
    param: Param<Tensor<D>>,
    gradient: Tensor<D>,
) -> Param<Tensor<D>> {
    let mut gradients = GradientsParams::new();
    gradients.register(param.id, gradient);
    optimizer.step(lr.clone(), One { path: path.to_vec(), param }, gradients).param
}

/// Takes sharded matrices out of a model, and steps what is whole.
struct Take<'a> {
    optimizer: &'a mut ModuleOptimizer,
    lr: &'a ModuleLearningRate,
    gradients: &'a mut GradientsParams,
    places: HashMap<ParamId, ParamIndex>,
    path: Vec<String>,
    matrices: Vec<Matrix>,
}

impl ModuleMapper for Take<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let gradient = self.gradients.remove::<D>(param.id);
        // A tied clone comes after its owner, with the same id, and finds nothing left.
        let Some(place) = self.places.remove(&param.id) else {
            return match gradient {
                Some(gradient) => step_param(self.optimizer, self.lr, &self.path, param, gradient),
                None => param,
            };
        };
        let (id, shard, mapper) = param.consume();
        // What is gathered is not held twice: the model gets its new shard at the end.
        let empty = Tensor::<D>::zeros([1; D], &shard.device().inner());
        let empty = like(&shard, empty);
        let step = MatrixStep { id, path: self.path.clone(), step: step_matrix::<D> };
        let (shard, gradient) = (shard.into_dispatch(), gradient.map(Tensor::into_dispatch));
        self.matrices.push(Matrix { place, step, shard, gradient });
        Param::from_mapped_value(id, empty, mapper)
    }
}

/// Puts new shards into a model.
struct Put {
    updated: HashMap<ParamId, DispatchTensor>,
}

impl ModuleMapper for Put {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(shard) = self.updated.remove(&param.id) else { return param };
        let (id, old, mapper) = param.consume();
        let shard = like(&old, Tensor::from_dispatch(shard));
        Param::from_mapped_value(id, shard, mapper)
    }
}

/// `value` with the autodiff state of another parameter's.
fn like<const D: usize>(old: &Tensor<D>, value: Tensor<D>) -> Tensor<D> {
    let Some(strategy) = old.gradient_checkpointing_strategy() else { return value };
    let value = Tensor::from_inner(value).with_gradient_checkpointing_strategy(strategy);
    value.set_require_grad(old.is_require_grad())
}

/// One parameter as a module, where the path of a larger one leads to it.
#[derive(Clone, Debug)]
struct One<const D: usize> {
    path: Vec<String>,
    param: Param<Tensor<D>>,
}

impl<const D: usize> One<D> {
    fn with(self, map: impl FnOnce(Param<Tensor<D>>) -> Param<Tensor<D>>) -> Self {
        Self { param: map(self.param), ..self }
    }
}

impl<const D: usize> Module for One<D> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.param.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.with(|param| param.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.with(|param| param.to_device(device))
    }

    fn train(self) -> Self {
        self.with(Module::train)
    }

    fn valid(&self) -> Self {
        Self { path: self.path.clone(), param: self.param.valid() }
    }

    fn materialize(self) -> Self {
        self.with(Module::materialize)
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.path.iter().for_each(|name| visitor.enter_module(name, ""));
        visitor.visit_float(&self.param);
        self.path.iter().rev().for_each(|name| visitor.exit_module(name, ""));
    }

    fn map<T: ModuleMapper>(self, mapper: &mut T) -> Self {
        let Self { path, param } = self;
        path.iter().for_each(|name| mapper.enter_module(name, ""));
        let param = mapper.map_float(param);
        path.iter().rev().for_each(|name| mapper.exit_module(name, ""));
        Self { path, param }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::layout::UnitLayout;
    use crate::layout::WorldSize;
    use crate::param_group::ParamSpec;

    fn unit(numels: &[usize], mesh: Mesh) -> Unit {
        let dtype = burn::tensor::DType::F32;
        let layout = UnitLayout::new(numels.iter().map(|&numel| (dtype, numel)), mesh.shard_size());
        let entry = |(segment, &numel): (usize, &usize)| ParamSpec {
            path: format!("weights.{segment}"),
            shape: vec![numel, 1],
            dtype,
            reduce_dtype: dtype,
            held: Placement::Shard(layout.shard_of(segment, mesh.shard_rank())),
            segment: Some(segment),
        };
        let entries = numels.iter().enumerate().map(entry).collect();
        Unit {
            name: Arc::from("unit"),
            path: String::new(),
            ty: "Unit",
            level: 0,
            field: false,
            entries,
            layout,
            gathers: true,
            precision: crate::options::Precision { input: None, output: None },
            checkpointed: false,
            within: None,
        }
    }

    #[test]
    fn owners_are_balanced_and_the_same_on_every_rank() {
        let world = WorldSize::new(3).unwrap();
        let numels = [500, 100, 90, 80, 400, 300, 300, 200, 200, 100];
        let on = |rank| {
            let mesh = Mesh::new(rank, world);
            owners(&[unit(&numels[..4], mesh), unit(&numels[4..], mesh)], mesh)
        };
        let first = on(Rank::ZERO);
        let mut loads = [0; 3];
        for (place, owner) in &first {
            loads[*owner] += numels[place.unit * 4 + place.entry];
        }
        let (least, most) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
        assert!(most - least <= 100, "{loads:?}");
        assert_eq!(first.len(), numels.len());
        assert!(world.ranks().all(|rank| on(rank) == first));
    }
}
