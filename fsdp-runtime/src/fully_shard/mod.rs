//! [`fully_shard`] and the sharded model it returns.

mod clip;
mod ignored;
pub(crate) mod init;
mod stats;

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Param, ParamGroup};
use burn::optim::GradientsParams;
use burn::store::ModuleRecord;
use burn::tensor::{Device, DispatchTensor, Gradients, Tensor};

use self::clip::scale_gradients;
pub use self::stats::Stats;
use crate::backend::Norm;
use crate::backend::kernels::batched_steps;
use crate::backend::{owned, with_backend};
use crate::collectives::group::{Group, MeshGroups, blocks};
use crate::error::{Error, ScheduleError, ShardError};
use crate::fully_shard::ignored::OwnGradients;
use crate::fully_shard::init::drawing::InitOwners;
use crate::fully_shard::init::{ShardingInit, agree};
use crate::launch::Worker;
use crate::launch::agree::{OnError, agree_result};
use crate::layout::{Mesh, Rank, WorldSize};
use crate::module::RandomStream;
use crate::module::opaque::visit_leaf;
use crate::module::{FsdpModule, HookedForward, ParamVisitor};
use crate::module::{ParamIndex, Sharded};
use crate::options::{BackwardPrefetch, FsdpOptions, OffloadPolicy, ReshardAfterForward};
use crate::param_group::Placement;
use crate::param_group::plan::{IgnoredParam, Key, Plan};
use crate::runtime::hooks::Collect;
use crate::runtime::schedule::{Engine, Reshard, Schedule, Settings};

/// Shards `module` over the ranks of `worker`. Every rank calls it with the same model.
///
/// Parameters that are not initialised yet are initialised and cut one by one, so that no rank holds
/// more than its shards, the gather buffers and parameters of a unit's size, and one that it receives
/// ([`FsdpOptions::with_cpu_ram_efficient_loading`] says which modules are built so). Where weights are
/// broadcast rank 0 draws them; under a [`seed`](FsdpOptions::with_seed), where they are the same whoever
/// does, processes share the work, so that an initialiser of your own must do the same on each. A value
/// travels while the next is drawn. The small ones of a unit that stay whole are broadcast together.
/// Parameter ids stay as they are: an optimizer or parameter group built before or after works alike.
///
/// The second of two tied weights is never initialised, unless it is a clone of the first: those
/// share one initialised value, which the rank that drew it holds until it has come to both.
///
/// # Errors
///
/// [`ShardError`](crate::ShardError) for a model that cannot be sharded, the same on every rank, and
/// [`CollectiveError`](crate::CollectiveError) when a rank does not come.
pub fn fully_shard<M: HookedForward>(
    module: M,
    worker: &Worker,
    options: FsdpOptions,
) -> Result<Fsdp<M>, Error> {
    shard(module, worker, options, |_| Ok(Vec::new()))
}

/// [`fully_shard`], without initialising the parameters that `later` names: they are loaded next.
pub(crate) fn shard<M: HookedForward>(
    module: M,
    worker: &Worker,
    options: FsdpOptions,
    later: impl FnOnce(&Plan) -> Result<Vec<ParamIndex>, Error>,
) -> Result<Fsdp<M>, Error> {
    let plan = || -> Result<_, ShardError> {
        options.check()?;
        let mesh = options.mesh(worker.mesh(), worker.local_size())?;
        let reshard = options.reshard(mesh)?;
        let plan = Plan::new(&module, mesh, &options)?;
        let device = options.compute_device(&plan.device, worker.device());
        options.check_offload(&plan.device, &device)?;
        options.policies().try_for_each(|policy| policy.check(&device))?;
        plan.check_dtypes(&device)?;
        Ok((mesh, reshard, plan, device))
    };
    let (mesh, reshard, plan, device) =
        agree_result(worker.comm(), "the plan of the model", plan(), OnError::FailWorld)?;
    agree(worker, &plan, &options, mesh)?;
    if worker.rank() == Rank::ZERO {
        plan.warn_of_left_out(&options);
    }
    let settings = settings(worker, &options, mesh, reshard)?;
    let mut later = later(&plan)?;
    if options.deferred_init {
        later = plan.places.iter().flatten().copied().collect();
    }
    with_backend!(device, |B, inner| {
        let random = RandomStream::new(options.seed.unwrap_or(0), worker.rank().index());
        let schedule = Schedule::<B>::new(
            settings,
            owned(&inner),
            worker.comm().clone(),
            plan.units.clone(),
            random.clone(),
        );
        schedule.set_unloaded(&later);
        let runtime = schedule.clone();
        let devices = (&device, inner);
        let owners = InitOwners::agree(&module, &plan, worker, &options)?;
        let mut cutter = ShardingInit::<B>::new(
            &plan, &later, owners, runtime, worker, &options, &random, devices,
        );
        let module = module.map_params(&mut cutter);
        let module = cutter.finish(module)?;
        Ok(Fsdp {
            module,
            engine: schedule,
            keys: Arc::new(plan.keys),
            ignored: Arc::new(plan.ignored),
            own: OwnGradients::default(),
        })
    })
}

/// How the schedule runs. Every rank calls it: the mesh's groups are made here.
fn settings(
    worker: &Worker,
    options: &FsdpOptions,
    mesh: Mesh,
    reshard: ReshardAfterForward,
) -> Result<Settings, Error> {
    // On the communication thread, as every collective.
    let world = worker.comm().world().clone();
    let groups = worker.comm().issue(move |_| MeshGroups::new(&world, mesh)).wait()?;
    let reshard = match reshard {
        ReshardAfterForward::Never => Reshard::Never,
        ReshardAfterForward::Always => Reshard::Always,
        ReshardAfterForward::To(size) => {
            let size = WorldSize::new(size).map_err(ShardError::from)?;
            let split = move |group: &Group| blocks(group, mesh, size);
            Reshard::To(Arc::new(worker.comm().issue_on(&groups.shard, split).wait()?))
        }
    };
    let ahead = options.slots > 1 || matches!(reshard, Reshard::Never);
    Ok(Settings {
        strategy: options.strategy,
        mesh,
        groups,
        reshard,
        slots: options.slots,
        forward_prefetch: options.forward_prefetch && ahead,
        backward_prefetch: match options.backward_prefetch {
            BackwardPrefetch::Pre if !ahead => BackwardPrefetch::None,
            prefetch => prefetch,
        },
        accumulation: options.gradient_accumulation,
        rest: options.offload.rest(),
        keep_sent: options.offload == OffloadPolicy::OptimizerOnly,
        offload_activations: options.offload_activations,
    })
}

/// A sharded model. It dereferences to the module, so that its `forward` and fields are used as
/// ever, and is a Burn [`Module`] itself: `optimizer.step(lr, model, grads)` returns it updated.
///
/// Clones and [`valid`](Self::valid) snapshots share the gather buffers: use one at a time.
#[derive(Clone, Debug)]
pub struct Fsdp<M> {
    pub(crate) module: M,
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) keys: Arc<BTreeMap<ParamIndex, Key>>,
    pub(crate) ignored: Arc<Vec<IgnoredParam>>,
    pub(crate) own: OwnGradients,
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
        self.engine.mesh()
    }

    /// Backpropagates `loss`, a single element, and returns the gradients of what this rank holds:
    /// of shards and of replicated parameters, averaged over all ranks. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`](crate::CollectiveError) when a rank does not come, and [`ScheduleError`]
    /// when two units need one buffer, or when `loss` is not one tracked element.
    pub fn backward(&self, loss: Tensor<1>) -> Result<GradientsParams, Error> {
        let from = self.run_backward(loss, false)?;
        let mut gradients = self.collect_gradients()?;
        self.own.add(&self.module, &from, &mut gradients);
        Ok(gradients)
    }

    /// Backpropagates the loss of a micro-batch whose gradients are to be added to the next ones':
    /// the [`backward`](Self::backward) that ends the step returns their sum. Scale each loss by 1
    /// over their number for the mean. What it costs is said at
    /// [`GradientAccumulation`](crate::GradientAccumulation).
    ///
    /// # Errors
    ///
    /// As [`backward`](Self::backward).
    pub fn accumulate(&self, loss: Tensor<1>) -> Result<(), Error> {
        let from = self.run_backward(loss, true)?;
        let mut sums = GradientsParams::new();
        self.own.add(&self.module, &from, &mut sums);
        self.own.put(sums);
        self.engine.finish_backward()
    }

    fn run_backward(&self, loss: Tensor<1>, accumulate: bool) -> Result<Gradients, Error> {
        if loss.dims() != [1] || !loss.is_autodiff() {
            let context = if loss.is_autodiff() { "with" } else { "without" };
            let found = format!("a tensor of shape {:?} {context} autodiff", loss.dims());
            return Err(ScheduleError::InvalidLoss { found }.into());
        }
        self.engine.begin_backward(accumulate);
        typed(|| loss.backward())
    }

    /// Ends a backward pass that another model's [`backward`](Self::backward) ran: for a loss that
    /// goes through several sharded models.
    ///
    /// # Errors
    ///
    /// As [`backward`](Self::backward).
    pub fn collect_gradients(&self) -> Result<GradientsParams, Error> {
        struct Take<'a> {
            engine: &'a dyn Engine,
            gradients: GradientsParams,
        }
        impl ParamVisitor for Take<'_> {
            fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let Some(sharded) = Sharded::of(param) else { return };
                if let Some(gradient) = self.engine.take_gradient(sharded.place) {
                    self.gradients.register(param.id, Tensor::<D>::from_dispatch(gradient));
                }
            }
        }
        self.engine.finish_backward()?;
        let mut take = Take { engine: &*self.engine, gradients: GradientsParams::new() };
        self.module.visit_params(&mut take);
        Ok(take.gradients)
    }

    /// Scales the gradients so that their 2-norm over all ranks and parameters is at most
    /// `max_norm`. Returns the norm before, which [`f64::INFINITY`] leaves as it is. Every rank calls
    /// it. Gradients of ignored parameters, of which each rank has its own, are not counted and stay as
    /// they are.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`](crate::CollectiveError) when a rank does not come.
    pub fn clip_grad_norm(
        &self,
        gradients: &mut GradientsParams,
        max_norm: f64,
    ) -> Result<f64, Error> {
        self.clip_grad_norm_by(gradients, max_norm, Norm::Two)
    }

    /// [`clip_grad_norm`](Self::clip_grad_norm) for any norm, as `torch.nn.utils.clip_grad_norm_`:
    /// scales by `max_norm / (norm + 1e-6)` where that is below 1. One all-reduce, of one number.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`](crate::CollectiveError) when a rank does not come.
    pub fn clip_grad_norm_by(
        &self,
        gradients: &mut GradientsParams,
        max_norm: f64,
        norm: Norm,
    ) -> Result<f64, Error> {
        struct Read<'a> {
            gradients: &'a GradientsParams,
            engine: &'a dyn Engine,
            found: Vec<(ParamIndex, DispatchTensor)>,
        }
        impl ParamVisitor for Read<'_> {
            fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let Some(sharded) = Sharded::of(param) else { return };
                if is_tied(self.engine, sharded) {
                    return;
                }
                if let Some(gradient) = self.gradients.get::<D>(param.id) {
                    self.found.push((sharded.place, gradient.into_dispatch()));
                }
            }
        }
        let mut read = Read { gradients, engine: &*self.engine, found: Vec::new() };
        self.module.visit_params(&mut read);
        let norm = self.engine.gradient_norm(read.found, norm)?;
        let factor = max_norm / (norm + 1e-6);
        if factor < 1.0 {
            scale_gradients(&self.module, gradients, factor);
        }
        Ok(norm)
    }

    /// A snapshot without autodiff, sharded as well, for evaluation. Drop it before the next
    /// optimizer step: while it lives, shards are copied instead of updated in place.
    #[must_use]
    pub fn valid(&self) -> Self {
        Module::valid(self)
    }
}

/// Whether another place holds the parameter: the two may have one id, and so one gradient.
fn is_tied(engine: &dyn Engine, sharded: &Sharded) -> bool {
    let ParamIndex { unit, entry } = sharded.place;
    matches!(engine.units()[unit].entries[entry].held, Placement::TiedTo(_))
}

/// Runs `f` and returns the typed error it unwound with.
fn typed<T>(f: impl FnOnce() -> T) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|panic: Box<dyn Any + Send>| {
        match panic.downcast::<Error>() {
            Ok(error) => *error,
            Err(panic) => resume_unwind(panic),
        }
    })
}

impl<M: Module> Fsdp<M> {
    fn with(&self, module: M) -> Self {
        Self {
            module,
            engine: self.engine.clone(),
            keys: self.keys.clone(),
            ignored: self.ignored.clone(),
            own: self.own.clone(),
        }
    }

    pub(crate) fn map_module(self, map: impl FnOnce(M) -> M) -> Self {
        Self { module: map(self.module), ..self }
    }
}

impl<M: Module> Module for Fsdp<M> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.module.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.map_module(|module| module.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.map_module(|module| module.to_device(device))
    }

    fn train(self) -> Self {
        self.map_module(Module::train)
    }

    fn valid(&self) -> Self {
        self.with(self.module.valid())
    }

    fn materialize(self) -> Self {
        let engine = self.engine.clone();
        // A tied place asks for what the place that owns the weight holds.
        visit_leaf(&self.module, &mut Collect(&*engine));
        let materialized = self.map_module(Module::materialize);
        engine.forget();
        materialized
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.module.visit(visitor);
    }

    fn map<T: ModuleMapper>(self, mapper: &mut T) -> Self {
        // An optimizer is such a mapper: its steps may share launches.
        batched_steps::scope(|| self.map_module(|module| module.map(mapper)))
    }

    /// The full state, as of the unsharded model, gathered to each rank: every rank calls it.
    /// [`save_burnpack`](Fsdp::save_burnpack) writes the same without holding it.
    ///
    /// # Panics
    ///
    /// Unwinds with the [`Error`] where a collective fails; `launch` returns it.
    fn into_record(self) -> ModuleRecord {
        self.materialize().module.into_record()
    }

    /// As [`into_record`](Self::into_record), of the parameters in a group.
    fn into_record_group(self, group: ParamGroup) -> ModuleRecord {
        self.materialize().module.into_record_group(group)
    }
}
