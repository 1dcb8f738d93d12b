//! Sharded matrices on their way through a step on full matrices: taken out of the model, ordered
//! by owner, updated, and put back.

use std::cmp::Reverse;
use std::collections::HashMap;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{ModuleMapper, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{DispatchTensor, Tensor};

use super::owners::owners;
use super::single_param::SingleParam;
use crate::module::{ParamIndex, with_autodiff_of};
use crate::runtime::schedule::{ErasedSchedule, Whole};

/// A sharded matrix that was taken out of the model.
pub(super) struct Matrix {
    index: ParamIndex,
    step: MatrixStep,
    shard: DispatchTensor,
    gradient: Option<DispatchTensor>,
}

/// The update of one full matrix.
pub(super) struct MatrixStep {
    pub(super) id: ParamId,
    /// Module path of the matrix.
    pub(super) path: Vec<String>,
    /// [`step_matrix`] for the matrix's number of dimensions.
    pub(super) step: StepMatrix,
}

/// The signature of [`step_matrix`], without the number of dimensions.
pub(super) type StepMatrix = fn(
    &mut ModuleOptimizer,
    &ModuleLearningRate,
    ParamId,
    &[String],
    DispatchTensor,
    DispatchTensor,
) -> DispatchTensor;

/// Returns the matrices in rounds, the largest first. A round has at most one matrix of each owner.
pub(super) fn rounds(
    schedule: &dyn ErasedSchedule,
    matrices: Vec<Matrix>,
) -> Vec<Vec<(MatrixStep, Whole)>> {
    let (units, mesh) = (schedule.units(), schedule.mesh());
    let owners = owners(units, mesh);
    let numel = |index: ParamIndex| units[index.unit].params[index.param].numel();
    let mut queues: Vec<Vec<_>> = mesh.shard_size().ranks().map(|_| Vec::new()).collect();
    for Matrix { index, step, shard, gradient } in matrices {
        let owner = owners[&index];
        queues[owner].push((step, Whole { index, owner, shard, gradient }));
    }
    let mut rounds: Vec<Vec<_>> = Vec::new();
    for mut queue in queues {
        queue.sort_by_key(|(_, whole)| (Reverse(numel(whole.index)), whole.index));
        rounds.resize_with(rounds.len().max(queue.len()), Vec::new);
        for (round, matrix) in rounds.iter_mut().zip(queue) {
            round.push(matrix);
        }
    }
    rounds
}

/// Returns a full matrix after an optimizer step with its full gradient.
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

/// Returns one parameter of a module after an optimizer step. `path` is the parameter's path in the
/// module.
fn step_param<const D: usize>(
    optimizer: &mut ModuleOptimizer,
    lr: &ModuleLearningRate,
    path: &[String],
    param: Param<Tensor<D>>,
    gradient: Tensor<D>,
) -> Param<Tensor<D>> {
    let mut gradients = GradientsParams::new();
    gradients.register(param.id, gradient);
    let module = SingleParam { path: path.to_vec(), param };
    optimizer.step(lr.clone(), module, gradients).param
}

/// The mapper that takes sharded matrices out of a model, and steps the replicated parameters.
pub(super) struct TakeMatrices<'a> {
    optimizer: &'a mut ModuleOptimizer,
    lr: &'a ModuleLearningRate,
    gradients: &'a mut GradientsParams,
    /// Sharded matrices that have a gradient on any rank.
    sharded: HashMap<ParamId, ParamIndex>,
    /// Segments of the module path.
    path: Vec<String>,
    matrices: Vec<Matrix>,
}

impl<'a> TakeMatrices<'a> {
    /// Returns a mapper that takes out the matrices in `sharded`.
    pub(super) fn new(
        optimizer: &'a mut ModuleOptimizer,
        lr: &'a ModuleLearningRate,
        gradients: &'a mut GradientsParams,
        sharded: HashMap<ParamId, ParamIndex>,
    ) -> Self {
        let (path, matrices) = (Vec::new(), Vec::new());
        Self { optimizer, lr, gradients, sharded, path, matrices }
    }

    /// Returns the matrices that were taken out.
    pub(super) fn into_matrices(self) -> Vec<Matrix> {
        self.matrices
    }
}

impl ModuleMapper for TakeMatrices<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let gradient = self.gradients.remove::<D>(param.id);
        // A tied clone has the id of its owner and comes after it, so its gradient is gone.
        let Some(index) = self.sharded.remove(&param.id) else {
            return match gradient {
                Some(gradient) => step_param(self.optimizer, self.lr, &self.path, param, gradient),
                None => param,
            };
        };
        let (id, shard, mapper) = param.consume();
        // The model has a placeholder until it gets the new shard, so that the old one can be
        // freed.
        let placeholder = Tensor::<D>::zeros([1; D], &shard.device().inner());
        let placeholder = with_autodiff_of(&shard, placeholder);
        let step = MatrixStep { id, path: self.path.clone(), step: step_matrix::<D> };
        let (shard, gradient) = (shard.into_dispatch(), gradient.map(Tensor::into_dispatch));
        self.matrices.push(Matrix { index, step, shard, gradient });
        Param::from_mapped_value(id, placeholder, mapper)
    }
}

/// The mapper that puts new shards into a model.
pub(super) struct PutShards {
    pub(super) updated: HashMap<ParamId, DispatchTensor>,
}

impl ModuleMapper for PutShards {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(shard) = self.updated.remove(&param.id) else { return param };
        let (id, old, mapper) = param.consume();
        let shard = with_autodiff_of(&old, Tensor::from_dispatch(shard));
        Param::from_mapped_value(id, shard, mapper)
    }
}
