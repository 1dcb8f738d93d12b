//! Cutting a model into fragments: each parameter is initialised, agreed on between ranks, and
//! replaced by what this rank holds of it, one after the other.

use std::sync::{Arc, Mutex};

use burn::backend::{Autodiff, AutodiffBackend, TensorMetadata};
use burn::module::Param;
use burn::tensor::{DType, Shape, Tensor};

use crate::backend::{Float, ShardBackend, Value};
use crate::collectives::{Op, ProcessGroup};
use crate::error::{CollectiveError, Error, ShardError};
use crate::group::{Held, Unit};
use crate::launch::Worker;
use crate::nn::Dropout;
use crate::nn::dropout::{Stream, mix};
use crate::options::FsdpOptions;
use crate::param::{Place, Runtime, Sharded};
use crate::plan::Plan;
use crate::unit::{Attach, Child};

/// The rebuild of a module's parameters into fragments.
pub(crate) struct Cutter<'a, B: ShardBackend> {
    plan: &'a Plan,
    runtime: Arc<dyn Runtime>,
    worker: &'a Worker,
    options: &'a FsdpOptions,
    random: &'a Arc<Stream>,
    device: B::Device,
    path: Vec<String>,
    next: usize,
    /// Elements of the parameters cut so far, and of all.
    done: usize,
    all: usize,
    /// A checksum of each parameter, where every rank initialised its own.
    checksums: Vec<u64>,
    checked: Vec<Place>,
    error: Option<Error>,
}

impl<'a, B: ShardBackend> Cutter<'a, B> {
    pub(crate) fn new(
        plan: &'a Plan,
        runtime: Arc<dyn Runtime>,
        worker: &'a Worker,
        options: &'a FsdpOptions,
        random: &'a Arc<Stream>,
        device: B::Device,
    ) -> Self {
        Self {
            plan,
            runtime,
            worker,
            options,
            random,
            device,
            path: Vec::new(),
            next: 0,
            done: 0,
            all: plan.units.iter().map(Unit::num_params).sum(),
            checksums: Vec::new(),
            checked: Vec::new(),
            error: None,
        }
    }

    /// Ends the rebuild: what went wrong, and whether the ranks had the same values.
    pub(crate) fn finish(self) -> Result<(), Error> {
        if let Some(error) = self.error {
            return Err(error);
        }
        if self.options.sync_module_states {
            return Ok(());
        }
        let all = self.worker.exchange("all_gather", "the initial values", self.checksums)?;
        for (rank, checksums) in self.worker.world().ranks().zip(&all) {
            let differs =
                checksums.iter().zip(all[0].iter()).position(|(found, expected)| found != expected);
            if let Some(index) = differs {
                let place = self.checked[index];
                let path = self.plan.units[place.unit].entries[place.entry].path.clone();
                return Err(ShardError::ValueMismatch { rank, path }.into());
            }
        }
        Ok(())
    }

    /// The base that `place` holds, from the full parameter.
    fn base(&mut self, place: Place, full: Float<B>) -> Result<Float<B>, Error> {
        let entry = &self.plan.units[place.unit].entries[place.entry];
        let shape = Shape::from(entry.base_shape());
        if matches!(entry.held, Held::TiedTo(_)) {
            return Ok(B::float_zeros(shape, &self.device, DType::F32.into()));
        }
        self.done += entry.numel();
        tracing::trace!(
            target: "fsdp::init",
            rank = self.worker.rank().index(),
            path = entry.path.as_str(),
            done = self.done,
            all = self.all,
            "fsdp::shard"
        );
        let full = if self.options.sync_module_states {
            let op = Op::new("broadcast", entry.path.as_str());
            let mine = (self.worker.rank().index() == 0).then_some(full);
            self.worker
                .comm()
                .issue(move |group| ProcessGroup::<B>::broadcast(group, &op, mine))
                .wait()?
        } else {
            self.checksums.push(checksum::<B>(&full));
            self.checked.push(place);
            full
        };
        let range = entry.range();
        Ok(match entry.held {
            _ if !range.is_empty() => B::fragment(full, range, shape),
            _ => B::float_zeros(shape, &self.device, DType::F32.into()),
        })
    }
}

impl<B: ShardBackend> Attach for Cutter<'_, B> {
    fn enter(&mut self, child: &'static Child, index: Option<usize>) {
        self.path.push(index.map_or_else(|| child.name.to_string(), |index| index.to_string()));
    }

    fn exit(&mut self) {
        self.path.pop();
    }

    fn param<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() {
            return param;
        }
        let index = self.next;
        self.next += 1;
        let Some(place) = self.plan.places[index] else { return param };
        let (id, tensor, mapper) = initialise(param, self.options.seed, index);
        let (tracked, dtype) = (tensor.is_require_grad(), tensor.dtype());
        let path = || self.plan.units[place.unit].entries[place.entry].path.clone();
        let value = match B::from_dispatch(tensor.clone().into_dispatch()) {
            Some(value) if dtype == DType::F32 => value,
            _ => {
                self.error = Some(ShardError::UnsupportedDtype { path: path(), dtype }.into());
                return Param::from_mapped_value(id, tensor, mapper);
            }
        };
        drop(tensor);
        let context = match &value {
            Value::Plain(_) => None,
            Value::Autodiff(_, context) => Some(*context),
        };
        let base = match self.base(place, value.into_inner()) {
            Ok(base) => base,
            Err(error) => {
                self.error = Some(error);
                let empty =
                    B::float_zeros(Shape::from(vec![1; D]), &self.device, DType::F32.into());
                let empty = Tensor::from_dispatch(B::into_dispatch(Value::Plain(empty)));
                return Param::from_mapped_value(id, empty, mapper);
            }
        };
        let base = match context {
            None => Value::Plain(base),
            Some(context) => Value::Autodiff(Autodiff::<B>::from_inner(base), context),
        };
        let base = Tensor::<D>::from_dispatch(B::into_dispatch(base)).set_require_grad(tracked);
        let sharded = Sharded::new(self.runtime.clone(), place);
        sharded.put_on(Param::from_mapped_value(id, base, mapper))
    }

    fn dropout(&mut self, dropout: Dropout) -> Dropout {
        dropout.with_stream(self.random, &self.path.join("."))
    }
}

/// The parts of a parameter, initialised if need be: from a seed of its own where there is one.
fn initialise<const D: usize>(
    param: Param<Tensor<D>>,
    seed: Option<u64>,
    index: usize,
) -> (burn::module::ParamId, Tensor<D>, burn::module::ParamMapper<Tensor<D>>) {
    /// Burn's generator is one a process: no other rank may draw between seeding and drawing.
    static DRAWING: Mutex<()> = Mutex::new(());
    let Some(seed) = seed.filter(|_| !param.is_initialized()) else { return param.consume() };
    let _drawing = DRAWING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    param.lazy_device().seed(mix(seed ^ mix(index as u64)));
    param.consume()
}

/// A checksum of a tensor's elements in order.
fn checksum<B: ShardBackend>(tensor: &Float<B>) -> u64 {
    let numel = tensor.shape().num_elements();
    let flat = B::float_reshape(tensor.clone(), Shape::from([numel]));
    let data = Tensor::<1>::from_dispatch(B::into_dispatch(Value::Plain(flat))).into_data();
    data.iter::<f32>().fold(0, |hash, element| mix(hash ^ u64::from(element.to_bits())))
}

/// All ranks must have built one model.
pub(crate) fn agree(worker: &Worker, plan: &Plan, options: &FsdpOptions) -> Result<(), Error> {
    let all = worker.exchange("all_gather", "the model's layout", plan.fingerprint(options))?;
    let first = &all[0];
    for (rank, lines) in worker.world().ranks().zip(&all) {
        if lines == first {
            continue;
        }
        let at = lines.iter().zip(first.iter()).position(|(a, b)| a != b);
        let at = at.unwrap_or(lines.len().min(first.len()));
        let line =
            |lines: &[String]| lines.get(at).cloned().unwrap_or_else(|| "nothing more".into());
        return Err(
            ShardError::ModelMismatch { rank, expected: line(first), found: line(lines) }.into()
        );
    }
    Ok(())
}

/// An error every rank finds by itself, so that none waits for the others.
pub(crate) fn same_on_all<T>(worker: &Worker, found: Result<T, ShardError>) -> Result<T, Error> {
    let message = found.as_ref().err().map(ToString::to_string);
    let all = worker.exchange("all_gather", "errors of construction", message)?;
    match found {
        Err(error) => Err(error.into()),
        Ok(value) => match worker.world().ranks().zip(&all).find(|(_, error)| error.is_some()) {
            None => Ok(value),
            Some((rank, reason)) => Err(CollectiveError::PeerFailed {
                rank,
                reason: reason.as_deref().unwrap_or_default().to_string(),
            }
            .into()),
        },
    }
}
