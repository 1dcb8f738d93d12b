//! Burn's own records of the full state: what `Module::save_file` writes of the same model unsharded,
//! and what `Module::load_file` reads.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::module::{ModuleVisitor, Param, ParamId};
use burn::tensor::{DispatchTensor, Tensor, TensorData};
use burn_pack::{Bytes, Tensor as PackTensor, Writer};

use super::fill::Target;
use super::fit::{Part, Wanted, fit};
use super::source::Source;
use super::{LoadError, LoadOptions, LoadReport, SaveError};
use crate::checkpoint::{State, StateMut};
use crate::error::Error;
use crate::fully_shard::Fsdp;
use crate::layout::Rank;
use crate::module::{FsdpModule, ParamVisitor};
use crate::module::{ParamIndex, Sharded};
use crate::runtime::schedule::Engine;

impl<M: FsdpModule> State<'_, M> {
    /// Writes the full state as a Burn record, which plain Burn loads into the unsharded model
    /// (`model.load_file(path)`) without this crate. `.bpk` is appended to a name without
    /// extension.
    ///
    /// Every rank calls it. Parameters are gathered one at a time to rank 0, which writes them as
    /// they come; running statistics are rank 0's. The file takes its name when it is complete.
    ///
    /// # Errors
    ///
    /// [`SaveError`] on rank 0, [`CollectiveError`](crate::CollectiveError) on the others.
    pub fn save_burnpack(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        let label = path.as_ref().display().to_string();
        let bases = self.model.held().bases;
        let (ids, buffers) = (self.model.ids(), self.model.buffers());
        let mut queue = Vec::new();
        for (unit, of) in self.model.engine.units().iter().enumerate() {
            for (entry, parameter) in of.entries.iter().enumerate() {
                // Plain Burn has a tied weight at each of its places, under one id.
                let id = ids.get(&ParamIndex { unit, entry }).copied();
                let place = ParamIndex { unit, entry: of.holder(entry) };
                queue.push((parameter.path.clone(), id, place, bases[&place].clone()));
            }
        }
        if self.model.mesh().rank != Rank::ZERO {
            for (.., place, base) in queue {
                self.model.engine.full(place, base, false)?;
            }
            return self.model.same_on_all("the save of a Burn record", Ok(()));
        }
        let units = self.model.engine.units();
        let shape = |place: &ParamIndex| units[place.unit].entries[place.entry].shape.clone();
        let named: Vec<_> =
            queue.iter().map(|(path, id, place, _)| (path.clone(), *id, shape(place))).collect();
        let gather = Arc::new(Gather {
            engine: self.model.engine.clone(),
            queue: Mutex::new(queue.into_iter().map(|(.., place, base)| (place, base)).collect()),
            failed: Mutex::new(None),
        });
        let parameters = named.into_iter().map(|(path, id, shape)| {
            let bytes = shape.iter().product::<usize>() * size_of::<f32>();
            let (gather, dtype) = (gather.clone(), burn::tensor::DType::F32);
            let id = id.map(|id| id.val());
            PackTensor::deferred(path, dtype, shape, id, bytes, move || gather.next())
        });
        let buffers = buffers.into_iter().map(|(path, buffer)| {
            let (bytes, shape, dtype) = buffer.data.into_parts();
            PackTensor::new(path, dtype, shape, Some(buffer.id.val()), bytes)
        });
        let written = Writer::new(parameters.chain(buffers).collect()).write_to_file(&path);
        // What a write that failed has not drawn, the other ranks still give.
        gather.drain()?;
        let written =
            written.map_err(|error| SaveError::Io { file: label, reason: error.to_string() });
        self.model.same_on_all("the save of a Burn record", written.map_err(Error::from))
    }
}

impl<M: FsdpModule> StateMut<'_, M> {
    /// Loads a Burn record of the full state, as [`save_burnpack`](Self::save_burnpack) or plain Burn
    /// wrote it, by module paths; each rank reads what it holds. Every rank calls it; on an error
    /// the model is unchanged on all.
    ///
    /// # Errors
    ///
    /// As [`load_safetensors`](Self::load_safetensors).
    pub fn load_burnpack(
        &mut self,
        path: impl AsRef<Path>,
        options: &LoadOptions,
    ) -> Result<LoadReport, Error> {
        let fitted = self.model.fit_burnpack(path.as_ref(), options).map_err(Error::from);
        let (parts, report) = self.model.same_on_all("the load of a Burn record", fitted)?;
        self.model.fill(parts);
        Ok(report)
    }
}

impl<M: FsdpModule> Fsdp<M> {
    fn fit_burnpack(
        &self,
        path: &Path,
        options: &LoadOptions,
    ) -> Result<(Vec<(Target, Part)>, LoadReport), LoadError> {
        let source = Source::record(path)?;
        let mut wanted = Vec::new();
        for (unit, of) in self.engine.units().iter().enumerate() {
            for (entry, parameter) in of.entries.iter().enumerate() {
                let target = Target::Parameter(ParamIndex { unit, entry });
                wanted.push((target, Wanted::of(parameter, &parameter.path, false)));
            }
        }
        for (name, buffer) in self.buffers() {
            let shape = buffer.data.shape().to_vec();
            wanted.push((Target::Local(buffer.id), Wanted::whole(&name, &shape, false)));
        }
        fit(&source, wanted, options)
    }

    /// What Burn's traversal shows and is not sharded, by path: ignored parameters, and what is no
    /// parameter, such as a running mean.
    fn buffers(&self) -> BTreeMap<String, Buffer> {
        let mut visit = Buffers {
            sharded: self.ids().into_values().collect(),
            path: Vec::new(),
            found: BTreeMap::new(),
        };
        // A running mean takes over its last update when a snapshot is made.
        self.module.valid().visit(&mut visit);
        visit.found
    }

    /// The id of the parameter at each place.
    fn ids(&self) -> HashMap<ParamIndex, ParamId> {
        struct Ids(HashMap<ParamIndex, ParamId>);
        impl ParamVisitor for Ids {
            fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                if let Some(sharded) = Sharded::of(param) {
                    self.0.insert(sharded.place, param.id);
                }
            }
        }
        let mut ids = Ids(HashMap::new());
        self.module.visit_params(&mut ids);
        ids.0
    }
}

/// The parameters still to be gathered, in the order in which all ranks give them.
struct Gather {
    engine: Arc<dyn Engine>,
    queue: Mutex<VecDeque<(ParamIndex, DispatchTensor)>>,
    failed: Mutex<Option<Error>>,
}

impl Gather {
    fn take(&self) -> Option<(ParamIndex, DispatchTensor)> {
        self.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).pop_front()
    }

    /// The next parameter, when the writer has come to it.
    fn next(&self) -> Result<Bytes, burn_pack::Error> {
        let (place, base) = self.take().ok_or(burn_pack::Error::ValidationError(
            "more tensors are written than there are parameters".into(),
        ))?;
        match self.engine.full(place, base, true) {
            Ok(full) => {
                Ok(full
                    .map_or_else(|| Bytes::from_bytes_vec(Vec::new()), |full| full.into_parts().0))
            }
            Err(error) => {
                let reason = error.to_string();
                *self.failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(error);
                Err(burn_pack::Error::IoError(reason))
            }
        }
    }

    /// Takes part in the gathers that are left.
    fn drain(&self) -> Result<(), Error> {
        let failed = self.failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        if let Some(error) = failed {
            return Err(error);
        }
        while let Some((place, base)) = self.take() {
            self.engine.full(place, base, false)?;
        }
        Ok(())
    }
}

struct Buffer {
    id: ParamId,
    data: TensorData,
}

struct Buffers {
    sharded: HashSet<ParamId>,
    path: Vec<String>,
    found: BTreeMap<String, Buffer>,
}

impl ModuleVisitor for Buffers {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.sharded.contains(&param.id) {
            let buffer = Buffer { id: param.id, data: param.base().into_data() };
            self.found.insert(self.path.join("."), buffer);
        }
    }
}
