//! Cutting a model into shards: each parameter is initialised, agreed on between ranks, and
//! replaced by what this rank holds of it, one after the other. One that is to be received or loaded
//! is never initialised here. What the communication thread brings takes its place at the end.

mod buffers;
pub(crate) mod drawing;
mod small;

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use burn::backend::TensorMetadata;
use burn::module::{Module, Param, ParamId, ParamMapper as ValueMapper};
use burn::tensor::{DType, Device, DispatchTensor, Shape, Tensor};

use self::drawing::{Broadcast, Broadcasts, InitOwners, Received, Values};
use self::small::{Fill, Pack, is_small};
use crate::backend::{Context, Float, ShardBackend, StoredTensor, Value};
use crate::collectives::comm::Work;
use crate::collectives::group::Group;
use crate::collectives::{Op, ProcessGroup};
use crate::error::{Error, ShardError};
use crate::launch::Worker;
use crate::launch::agree::{OnError, agree_result};
use crate::layout::Mesh;
use crate::layout::mix;
use crate::module::{Child, FsdpModule, ParamMapper, RandomSource, RandomStream};
use crate::module::{ParamIndex, Runtime, Sharded};
use crate::options::FsdpOptions;
use crate::param_group::plan::{Plan, SHARDED};
use crate::param_group::{ParamSpec, Placement, Unit};

/// The rebuild of a module's parameters into shards.
pub(crate) struct ShardingInit<'a, B: ShardBackend> {
    plan: &'a Plan,
    /// Parameters that are loaded once the model is cut.
    later: HashSet<ParamIndex>,
    runtime: Arc<dyn Runtime>,
    worker: &'a Worker,
    options: &'a FsdpOptions,
    random: &'a Arc<RandomStream>,
    compute: Device,
    device: B::Device,
    context: Option<Context>,
    path: Vec<String>,
    next: usize,
    /// Parameters cut so far.
    cut: usize,
    /// Elements of the parameters that have their value, and of all.
    done: usize,
    all: usize,
    /// What rank 0 broadcasts together, a unit each.
    packs: Vec<Pack<B>>,
    /// Who draws what, and what is on its way from there.
    owners: InitOwners,
    broadcasts: Broadcasts<B>,
    /// What has come, for the stand-ins of these parameters.
    received: HashMap<ParamId, DispatchTensor>,
    /// A checksum of each parameter, where every rank initialised its own.
    checksums: Vec<u64>,
    checked: Vec<ParamIndex>,
    /// What this rank alone found wrong. It still takes part until all are through.
    found: Option<ShardError>,
    /// What ended the group.
    error: Option<Error>,
}

impl<'a, B: ShardBackend> ShardingInit<'a, B> {
    #[allow(clippy::too_many_arguments, reason = "what a model is cut with, from one place")]
    pub(crate) fn new(
        plan: &'a Plan,
        later: &[ParamIndex],
        owners: InitOwners,
        runtime: Arc<dyn Runtime>,
        worker: &'a Worker,
        options: &'a FsdpOptions,
        random: &'a Arc<RandomStream>,
        (compute, device): (&Device, B::Device),
    ) -> Self {
        let probe = Tensor::<1>::zeros([1], compute).into_dispatch();
        let context = match B::from_dispatch(probe) {
            Some(Value::Autodiff(_, context)) => Some(context),
            _ => None,
        };
        let later: HashSet<ParamIndex> = later.iter().copied().collect();
        let pack = |(index, unit): (usize, &Unit)| {
            let later = |entry| later.contains(&ParamIndex { unit: index, entry });
            Pack::new(unit, |entry| is_small(&unit.entries[entry]) && !later(entry))
        };
        let largest = plan.units.iter().map(Unit::num_params).max().unwrap_or(0);
        Self {
            plan,
            owners,
            broadcasts: Broadcasts::new(largest),
            packs: plan.units.iter().enumerate().map(pack).collect(),
            received: HashMap::new(),
            later,
            runtime,
            worker,
            options,
            random,
            compute: compute.clone(),
            device,
            context,
            path: Vec::new(),
            next: 0,
            cut: 0,
            done: 0,
            all: plan.units.iter().map(Unit::num_params).sum(),
            checksums: Vec::new(),
            checked: Vec::new(),
            found: None,
            error: None,
        }
    }

    /// Ends the rebuild, which has made `module`: with what went wrong, whether the ranks had the same
    /// values, and those values that have come.
    pub(crate) fn finish<M: FsdpModule>(mut self, module: M) -> Result<M, Error> {
        self.settle(None);
        if let Some(error) = self.error {
            return Err(error);
        }
        let initialised = self.found.map_or(Ok(()), Err);
        agree_result(self.worker.comm(), "the initialisation", initialised, OnError::FailWorld)?;
        if self.options.sync_module_states {
            let mut fill = Fill(self.received);
            let module = if fill.0.is_empty() { module } else { module.map(&mut fill) };
            assert!(fill.0.is_empty(), "every value that came has taken its place");
            return buffers::share(self.worker, &self.plan.ignored, module);
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
        Ok(module)
    }

    fn entry(&self, place: ParamIndex) -> &'a ParamSpec {
        &self.plan.units[place.unit].entries[place.entry]
    }

    /// Tells that one more parameter has its value.
    fn told(&mut self, place: ParamIndex) {
        let entry = self.entry(place);
        self.done += entry.numel();
        tracing::trace!(
            target: "fsdp::init",
            rank = self.worker.rank().index(),
            path = entry.path.as_str(),
            done = self.done,
            all = self.all,
            "fsdp::shard"
        );
    }

    /// Waits for values: all of them, or until so many elements more may be held for others.
    fn settle(&mut self, room_for: Option<usize>) {
        while let Some(received) = self.broadcasts.next(room_for) {
            match received {
                Ok(Received { place, values }) => {
                    place.into_iter().for_each(|place| self.told(place));
                    let context = self.context;
                    let values = values.into_iter();
                    self.received
                        .extend(values.map(|(id, value)| (id, value.with_context(context))));
                }
                Err(error) => {
                    self.error.get_or_insert(error.into());
                }
            }
        }
    }

    /// The base that `place` holds, under the parameter's id, from the full parameter; `None` where
    /// this rank receives it from rank `root`. Of what travels by itself it is a stand-in of one element.
    fn base(
        &mut self,
        place: ParamIndex,
        id: ParamId,
        full: Option<Float<B>>,
        root: usize,
    ) -> Float<B> {
        let entry = self.entry(place);
        let (device, rest) = (self.device.clone(), self.options.offload.rest());
        if !self.options.sync_module_states {
            let full = full.unwrap_or_else(|| self.filled(&entry.shape, 0.0));
            self.told(place);
            self.checksums.push(checksum::<B>(&full));
            self.checked.push(place);
            return part::<B>(full, entry.range(), entry.base_shape(), &device);
        }
        let mine = full.filter(|_| self.worker.rank().index() == root);
        if is_small(entry) {
            self.told(place);
            return self.packed(place, id, mine);
        }
        let held = mine.as_ref().map_or(0, |_| entry.numel());
        let (range, shape) = (entry.range(), entry.base_shape());
        // The full parameter is gone before the next one comes.
        let keep = move |full| {
            vec![(id, StoredTensor::<B>::rest(part::<B>(full, range, shape, &device), rest))]
        };
        let values = self.broadcast(entry.path.as_str(), entry.numel(), mine, keep);
        self.broadcasts.push(Broadcast { place: Some(place), held, values });
        self.filled(&vec![1; entry.shape.len()], 0.0)
    }

    /// The base of a small replicated parameter, whose value travels with its unit's others: on rank 0
    /// the value, `mine`, elsewhere a stand-in of one element.
    fn packed(&mut self, place: ParamIndex, id: ParamId, mine: Option<Float<B>>) -> Float<B> {
        let entry = self.entry(place);
        let shape = Shape::from(entry.shape.clone());
        let mine = mine.map(|full| B::copy_range(full, entry.range(), shape.clone()));
        let base = mine.clone();
        if let Some(pack) = self.packs[place.unit].add(id, shape, mine) {
            self.exchange_pack(&self.plan.units[place.unit].name, pack);
        }
        base.unwrap_or_else(|| self.filled(&vec![1; entry.shape.len()], 0.0))
    }

    /// Sends the values of a complete pack, or receives them.
    fn exchange_pack(&mut self, unit: &str, mut pack: Pack<B>) {
        let sends = self.worker.rank().index() == 0;
        let packed = sends.then(|| pack.pack(&self.device));
        let (numel, rest) = (pack.numel(), self.options.offload.rest());
        let keep = move |packed| match sends {
            true => Vec::new(),
            false => {
                let values = pack.unpack(packed);
                values.map(|(id, value)| (id, StoredTensor::<B>::rest(value, rest))).collect()
            }
        };
        let values =
            self.broadcast(&format!("the small parameters of {unit}"), numel, packed, keep);
        self.broadcasts.push(Broadcast { place: None, held: 0, values });
    }

    /// What `keep` makes of the tensor that one rank gives.
    fn broadcast(
        &self,
        what: &str,
        numel: usize,
        mine: Option<Float<B>>,
        keep: impl FnOnce(Float<B>) -> Values<B> + Send + 'static,
    ) -> Work<Values<B>> {
        tracing::trace!(target: "fsdp", unit = %what, "fsdp::broadcast");
        let op = Op::new("broadcast", what).of(numel);
        let device = self.device.clone();
        self.worker.comm().issue(move |group: &Group| {
            ProcessGroup::<B>::broadcast(group, &op, &device, mine).map(keep)
        })
    }

    /// A tensor of one value.
    fn filled(&self, shape: &[usize], value: f32) -> Float<B> {
        filled::<B>(shape, value, &self.device)
    }

    /// The full parameter, initialised if need be. What is wrong with it is kept, and zeros go on
    /// in its place, so that no rank waits for this one.
    fn full<const D: usize>(&mut self, place: ParamIndex, tensor: Tensor<D>) -> Float<B> {
        let ParamSpec { path, shape, .. } = self.entry(place);
        let (path, declared, found) = (path.clone(), shape.clone(), tensor.shape().to_vec());
        let dtype = tensor.dtype();
        let rest = self.options.offload.rest();
        let wrong = match StoredTensor::<B>::read(tensor.into_dispatch(), rest) {
            Some((value, ..)) if SHARDED.contains(&dtype) && found == declared => {
                return value.on_device(&self.device, DType::F32, rest);
            }
            Some(_) if SHARDED.contains(&dtype) => ShardError::InitShape { path, declared, found },
            _ => ShardError::UnsupportedDtype { path, dtype },
        };
        self.found.get_or_insert(wrong);
        self.filled(shape, 0.0)
    }

    /// Whether rank `root`'s value is to be received, without initialising any here.
    fn receives<const D: usize>(&self, param: &Param<Tensor<D>>, root: usize) -> bool {
        self.options.sync_module_states
            && self.options.cpu_ram_efficient_loading
            && self.worker.rank().index() != root
            && !param.is_initialized()
    }

    /// A Burn tensor where the model's parameters rest.
    fn tensor<const D: usize>(&self, value: Float<B>) -> Tensor<D> {
        Tensor::from_dispatch(self.at_rest(value))
    }

    fn at_rest(&self, value: Float<B>) -> DispatchTensor {
        StoredTensor::<B>::rest(value, self.options.offload.rest()).with_context(self.context)
    }

    /// The parts of a parameter but for its value, which is not initialised.
    fn shell<const D: usize>(&self, param: Param<Tensor<D>>) -> Shell<D> {
        let id = param.id;
        // What a parameter is loaded with takes over its settings.
        let stand_in = self.tensor(self.filled(&[1; D], 0.0));
        let (id, stand_in, mapper) = param.transform_for_load(stand_in, id).consume();
        Shell { id, tracked: stand_in.is_require_grad(), mapper }
    }
}

/// A parameter without its value.
struct Shell<const D: usize> {
    id: ParamId,
    tracked: bool,
    mapper: ValueMapper<Tensor<D>>,
}

impl<B: ShardBackend> ParamMapper for ShardingInit<'_, B> {
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
        let Some(place) = self.plan.places[index] else { return self.unmanaged(param) };
        // An ignored parameter may be there on some ranks alone.
        let ordinal = self.cut;
        self.cut += 1;
        let entry = self.entry(place);
        let (shell, base) = if matches!(entry.held, Placement::TiedTo(_)) {
            (self.shell(param), self.filled(&entry.base_shape(), 0.0))
        } else if self.later.contains(&place) {
            // Never a plausible number.
            (self.shell(param), self.filled(&entry.base_shape(), f32::NAN))
        } else {
            let root = match is_small(entry) {
                true => 0,
                false => self.owners.root(place, entry.numel()),
            };
            if self.receives(&param, root) {
                let shell = self.shell(param);
                let base = self.base(place, shell.id, None, root);
                (shell, base)
            } else {
                self.settle(Some(entry.numel()));
                let (id, tensor, mapper) = initialise(param, self.options.seed, ordinal);
                let tracked = tensor.is_require_grad();
                let full = self.full(place, tensor);
                (Shell { id, tracked, mapper }, self.base(place, id, Some(full), root))
            }
        };
        let base = self.tensor::<D>(base).set_require_grad(shell.tracked);
        let sharded = Sharded::new(self.runtime.clone(), place);
        sharded.put_on(Param::from_mapped_value(shell.id, base, shell.mapper))
    }

    fn unmanaged<M: Module>(&mut self, module: M) -> M {
        match self.plan.device == self.compute {
            true => module,
            // A parameter stays a leaf, which `to_device` would not leave it.
            false => module.fork(&self.compute),
        }
    }

    fn random_source<R: RandomSource>(&mut self, source: R) -> R {
        source.with_stream(self.random, &self.path.join("."))
    }
}

/// A tensor of one value.
fn filled<B: ShardBackend>(shape: &[usize], value: f32, device: &B::Device) -> Float<B> {
    B::float_full(Shape::from(shape.to_vec()), value.into(), device, DType::F32.into())
}

/// The base of these elements of a full parameter, of this shape.
fn part<B: ShardBackend>(
    full: Float<B>,
    range: Range<usize>,
    shape: Vec<usize>,
    device: &B::Device,
) -> Float<B> {
    match range.is_empty() {
        true => filled::<B>(&shape, 0.0, device),
        false => B::copy_range(full, range, shape.into()),
    }
}

/// The parts of a parameter, initialised if need be: from a seed of its own where there is one.
fn initialise<const D: usize>(
    param: Param<Tensor<D>>,
    seed: Option<u64>,
    ordinal: usize,
) -> (ParamId, Tensor<D>, ValueMapper<Tensor<D>>) {
    /// Burn's generator is one a process: no other rank, and no model without a seed that is sharded
    /// beside this one, may draw between seeding and drawing.
    static DRAWING: Mutex<()> = Mutex::new(());
    if param.is_initialized() {
        return param.consume();
    }
    let _drawing = DRAWING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(seed) = seed {
        param.lazy_device().seed(mix(seed ^ mix(ordinal as u64)));
    }
    param.consume()
}

/// A checksum of a tensor's elements in order.
fn checksum<B: ShardBackend>(tensor: &Float<B>) -> u64 {
    let numel = tensor.shape().num_elements();
    let flat = B::float_reshape(tensor.clone(), Shape::from([numel]));
    let data = Tensor::<1>::from_dispatch(B::into_dispatch(Value::Plain(flat))).into_data();
    data.iter::<f32>().fold(0, |hash, element| mix(hash ^ u64::from(element.to_bits())))
}

/// All ranks must have built one model, to be trained in one way by one version of this crate.
pub(crate) fn agree(
    worker: &Worker,
    plan: &Plan,
    options: &FsdpOptions,
    mesh: Mesh,
) -> Result<(), Error> {
    let mut mine = vec![
        format!("{} {}", env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION")),
        format!("engine {}", worker.comm().world().engine()),
    ];
    mine.extend(plan.fingerprint(options, mesh));
    let all = worker.exchange("all_gather", "the model's layout", mine)?;
    let first = &all[0];
    // The first line that differs, and every rank that has what the first such rank has there.
    let Some(other) = all.iter().find(|lines| *lines != first) else { return Ok(()) };
    let at = other.iter().zip(first.iter()).position(|(a, b)| a != b);
    let at = at.unwrap_or(other.len().min(first.len()));
    let line = |lines: &[String]| lines.get(at).cloned().unwrap_or_else(|| "nothing more".into());
    let found = line(other);
    let ranks = worker.world().ranks().zip(&all);
    let ranks = ranks.filter(|(_, lines)| line(lines) == found).map(|(rank, _)| rank).collect();
    Err(ShardError::ModelMismatch { ranks, expected: line(first), found }.into())
}
