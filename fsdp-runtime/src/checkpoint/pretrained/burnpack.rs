//! Burn's own records of the full state: the file that `Module::save_file` writes of the same model
//! unsharded, and that `Module::load_file` reads.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use burn::module::{ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, DispatchTensor, Tensor, TensorData};
use burn_pack::{Bytes, Tensor as PackTensor, Writer};

use super::frozen::FrozenParams;
use super::load_values::{ParamTarget, load_values};
use super::local_values::LocalValues;
use super::matching::{MatchedTensor, WantedTensor, match_tensors};
use super::options::LoadOptions;
use super::source::Source;
use crate::backend::owned_data;
use crate::checkpoint::filter::FilteredParam;
use crate::checkpoint::load_report::LoadReport;
use crate::checkpoint::ranks::{Ranks, SAVE_WHOLE};
use crate::checkpoint::state::{State, StateMut};
use crate::error::{Error, IgnorePoison, LoadError, SaveError};
use crate::fully_shard::Fsdp;
use crate::module::param_ids;
use crate::module::{FsdpModule, ParamIndex};
use crate::runtime::schedule::ErasedSchedule;

/// Name of the save in the errors of collectives.
const SAVE: &str = "the save of a Burn record";

impl<M: FsdpModule> State<'_, M> {
    /// Writes the full state as a Burn record, which plain Burn loads into the unsharded model with
    /// `model.load_file(path)`. A path without extension gets `.bpk`.
    ///
    /// Every rank calls it. Parameters are gathered one at a time to rank 0, which writes each
    /// before the next is gathered. Running statistics and ignored parameters are rank 0's. The
    /// file is renamed to `path` when it is complete.
    ///
    /// # Errors
    ///
    /// [`SaveError`] on rank 0, [`CollectiveError`](crate::errors::CollectiveError) on the others.
    pub fn save_burnpack(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        self.model.schedule.check_whole("a Burn record", SAVE_WHOLE)?;
        let ranks = Ranks::from(self.model);
        let params = record_params(self.model);
        // On every rank: the snapshot applies pending updates of running statistics.
        let others = non_sharded(self.model);
        if !ranks.leads() {
            for param in params {
                self.model.schedule.full(param.holder, param.base, false)?;
            }
            return ranks.agree(SAVE, Ok::<_, Error>(()));
        }
        let label = path.as_ref().display().to_string();
        let queue = params.iter().map(|param| (param.holder, param.base.clone())).collect();
        let gather = Arc::new(GatherQueue {
            schedule: self.model.schedule.clone(),
            queue: Mutex::new(queue),
            failed: Mutex::new(None),
        });
        let params = params.into_iter().map(|RecordParam { path, id, shape, .. }| {
            let bytes = shape.iter().product::<usize>() * size_of::<f32>();
            let (gather, id) = (gather.clone(), id.map(|id| id.val()));
            PackTensor::deferred(path, DType::F32, shape, id, bytes, move || gather.next())
        });
        let others = others.into_iter().map(|(path, tensor)| {
            let (bytes, shape, dtype) = tensor.data.into_parts();
            PackTensor::new(path, dtype, shape, Some(tensor.id.val()), bytes)
        });
        let written = Writer::new(params.chain(others).collect()).write_to_file(&path);
        // After a failed write, rank 0 still takes part in the other ranks' remaining gathers.
        gather.drain()?;
        let written =
            written.map_err(|error| SaveError::Io { file: label, reason: error.to_string() });
        ranks.agree(SAVE, written)
    }
}

impl<M: FsdpModule> StateMut<'_, M> {
    /// Loads a Burn record of the full state by module paths, written by [`State::save_burnpack`]
    /// or by plain Burn. Each rank reads only the elements that it stores. Every rank calls it. On
    /// an error the model is unchanged on all ranks.
    ///
    /// # Errors
    ///
    /// Those of [`load_safetensors`](Self::load_safetensors).
    pub fn load_burnpack(
        &mut self,
        path: impl AsRef<Path>,
        options: &LoadOptions,
    ) -> Result<LoadReport, Error> {
        let matched = match_record(self.model, path.as_ref(), options);
        let ranks = Ranks::from(&*self.model);
        let (matched, report) = ranks.agree("the load of a Burn record", matched)?;
        load_values(self.model, matched);
        Ok(report)
    }
}

/// Matches the tensors of a Burn record to a model's parameters.
fn match_record<M: FsdpModule>(
    model: &Fsdp<M>,
    path: &Path,
    options: &LoadOptions,
) -> Result<(Vec<(ParamTarget, MatchedTensor)>, LoadReport), LoadError> {
    let mut wanted = Vec::new();
    for (unit, parameters) in model.schedule.units().iter().enumerate() {
        for (entry, spec) in parameters.params.iter().enumerate() {
            let target = ParamTarget::Sharded(ParamIndex { unit, param: entry });
            let mut tensor = WantedTensor::of_param(spec, &spec.path, false);
            let owner = &parameters.params[parameters.holder(entry)];
            if owner.path != spec.path {
                tensor = tensor.copy_of(&owner.path, owner);
            }
            wanted.push((target, spec.path.clone(), tensor));
        }
    }
    for (name, tensor) in non_sharded(model) {
        let shape = tensor.data.shape().to_vec();
        let target = ParamTarget::PerRank(tensor.id);
        let tensor = WantedTensor::full(&name, &shape, false);
        wanted.push((target, name, tensor));
    }
    let frozen = FrozenParams::of(model);
    fn seen(path: &str, frozen: bool) -> FilteredParam<'_> {
        FilteredParam { path, key: path, frozen }
    }
    let all = wanted.iter().map(|(target, path, _)| seen(path, frozen.contains(*target)));
    options.filter.check(all).map_err(|reason| LoadError::Filter { reason })?;
    let wanted = wanted.into_iter().map(|(target, path, tensor)| {
        let selected = options.filter.selects(&seen(&path, frozen.contains(target)));
        (target, tensor.selected(selected))
    });
    let source = Source::record(path)?;
    match_tensors(&source, wanted, options)
}

/// A parameter to write to a record.
struct RecordParam {
    path: String,
    id: Option<ParamId>,
    shape: Vec<usize>,
    /// Index of the parameter whose values are written: for a tied parameter, its owner.
    holder: ParamIndex,
    /// This rank's part of the holder's elements.
    base: DispatchTensor,
}

/// Returns the sharded and replicated parameters in the order of a record. Plain Burn writes a tied
/// weight at each of the paths that share it, with equal ids.
fn record_params<M: FsdpModule>(model: &Fsdp<M>) -> Vec<RecordParam> {
    let values = LocalValues::of(model).sharded;
    let ids = param_ids(&model.module);
    let mut params = Vec::new();
    for (unit, parameters) in model.schedule.units().iter().enumerate() {
        for (entry, spec) in parameters.params.iter().enumerate() {
            let holder = ParamIndex { unit, param: parameters.holder(entry) };
            params.push(RecordParam {
                path: spec.path.clone(),
                id: ids.get(&ParamIndex { unit, param: entry }).copied(),
                shape: parameters.params[holder.param].shape.clone(),
                holder,
                base: values[&holder].clone(),
            });
        }
    }
    params
}

/// The parameters still to be gathered, in the order in which all ranks gather them.
struct GatherQueue {
    schedule: Arc<dyn ErasedSchedule>,
    queue: Mutex<VecDeque<(ParamIndex, DispatchTensor)>>,
    failed: Mutex<Option<Error>>,
}

impl GatherQueue {
    fn pop(&self) -> Option<(ParamIndex, DispatchTensor)> {
        lock(&self.queue).pop_front()
    }

    /// Gathers the next parameter. The record's writer calls it when it has written the previous
    /// one.
    fn next(&self) -> Result<Bytes, burn_pack::Error> {
        let (index, base) = self.pop().ok_or(burn_pack::Error::ValidationError(
            "more tensors are written than there are parameters".into(),
        ))?;
        match self.schedule.full(index, base, true) {
            Ok(full) => {
                Ok(full
                    .map_or_else(|| Bytes::from_bytes_vec(Vec::new()), |full| full.into_parts().0))
            }
            Err(error) => {
                let reason = error.to_string();
                *lock(&self.failed) = Some(error);
                Err(burn_pack::Error::IoError(reason))
            }
        }
    }

    /// Takes part in the remaining gathers, unless a gather has failed.
    fn drain(&self) -> Result<(), Error> {
        let failed = lock(&self.failed).take();
        if let Some(error) = failed {
            return Err(error);
        }
        while let Some((index, base)) = self.pop() {
            self.schedule.full(index, base, false)?;
        }
        Ok(())
    }
}

/// Locks a value that is valid at every moment, so that a panic of another thread does not matter.
fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().ignore_poison()
}

/// A tensor of a module that is not sharded.
struct NonSharded {
    id: ParamId,
    data: TensorData,
}

/// Returns the tensors of Burn's traversal that are not sharded or replicated, by path: ignored
/// parameters, and running statistics.
fn non_sharded<M: FsdpModule>(model: &Fsdp<M>) -> BTreeMap<String, NonSharded> {
    let sharded = param_ids(&model.module).into_values().collect();
    let mut visitor = NonShardedVisitor { sharded, path: Vec::new(), found: BTreeMap::new() };
    // A snapshot for evaluation: making it applies the pending update of each running statistic.
    model.module.valid().visit(&mut visitor);
    visitor.found
}

/// The visitor behind [`non_sharded`].
struct NonShardedVisitor {
    sharded: HashSet<ParamId>,
    path: Vec<String>,
    found: BTreeMap<String, NonSharded>,
}

impl ModuleVisitor for NonShardedVisitor {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.sharded.contains(&param.id) {
            let tensor = NonSharded { id: param.id, data: owned_data(param.base().into_data()) };
            self.found.insert(self.path.join("."), tensor);
        }
    }
}
