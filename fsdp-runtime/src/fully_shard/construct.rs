//! [`fully_shard`], which makes a sharded model of a module.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use burn::tensor::Device;

use super::gradient_hook::GradientHook;
use super::ignored_gradients::IgnoredGradients;
use super::init::{InitDevice, InitOwners, InitSetup, ShardingInit, check_same_model};
use super::model::Fsdp;
use super::optimizer_check::OptimizerCheck;
use crate::backend::{DeviceKind, Raw, check_device, clone_device, with_backend};
use crate::collectives::group::MeshGroups;
use crate::error::{Error, ShardError};
use crate::launch::Worker;
use crate::launch::agree::{OnError, agree_result};
use crate::layout::Mesh;
use crate::module::{HookedForward, ParamIndex, RandomStream};
use crate::options::{FsdpOptions, OffloadPolicy, ReshardAfterForward};
use crate::param_group::memory::OptimizerStates;
use crate::param_group::plan::ModelPlan;
use crate::runtime::schedule::decide::Timing;
use crate::runtime::schedule::{Schedule, Settings, block_group, common_buffers};

/// Shards `module` over the ranks of `worker`, and returns the sharded model. Every rank calls it
/// with the same model and the same options.
///
/// # Initialisation
///
/// Parameters that have no value yet are initialised one at a time, and each is replaced by this
/// rank's shard before the next one. A rank therefore never stores more than its shards, the gather
/// buffers, full parameters with the elements of the largest unit, and one parameter that it
/// receives. [`FsdpOptions::with_cpu_ram_efficient_loading`] says which modules are built without
/// values.
///
/// By default, rank 0 initialises the weights and broadcasts them. With a
/// [`seed`](FsdpOptions::with_seed), processes share this work, so custom initialisers must give
/// the same values in every process. Broadcasts overlap with the initialisation of later
/// parameters. The small replicated parameters of a unit are broadcast together.
///
/// A tied weight is initialised once, by its owner. If the alias is a clone of the owner, the rank
/// that initialises the weight keeps the full value until it has replaced both.
///
/// Parameter ids do not change, so an optimizer or a parameter group may be built before or after
/// sharding.
///
/// # Errors
///
/// [`ShardError`] for a model that cannot be sharded, on every rank, and
/// [`CollectiveError`](crate::errors::CollectiveError) if another rank fails or does not take part within
/// the time-out.
pub fn fully_shard<M: HookedForward>(
    module: M,
    worker: &Worker,
    options: FsdpOptions,
) -> Result<Fsdp<M>, Error> {
    shard(module, worker, options, |_| Ok(Vec::new()))
}

/// Shards a module as [`fully_shard`] does, without initialising the parameters that `loaded_later`
/// returns.
pub(crate) fn shard<M: HookedForward>(
    module: M,
    worker: &Worker,
    options: FsdpOptions,
    loaded_later: impl FnOnce(&ModelPlan) -> Result<Vec<ParamIndex>, Error>,
) -> Result<Fsdp<M>, Error> {
    const { M::CHECKED };
    let planned = Planned::new(&module, worker, &options);
    let Planned { mesh, plan, device } =
        agree_result(worker.comm(), "the plan of the model", planned, OnError::FailWorld)?;
    check_same_model(worker, &plan, &options, mesh)?;
    if worker.is_rank_zero() {
        plan.warn_of_left_out(&options);
    }
    let settings = settings(worker, &options, (mesh, &plan), &device)?;
    let mut later = loaded_later(&plan)?;
    if options.deferred_init {
        later = plan.indices.iter().flatten().copied().collect();
    }
    with_backend!(device, |B, inner| {
        let random = RandomStream::new(options.seed.unwrap_or(0), Some(mesh));
        let comm = worker.comm().among(settings.groups.data.clone());
        let common = match options.gathers_in_place() {
            true => common_buffers::<Raw<B>>(
                worker.comm(),
                &settings.groups.shard,
                &inner,
                &plan.units,
            )?,
            false => vec![None; plan.units.len()],
        };
        let schedule = Schedule::<B>::new(
            settings,
            clone_device(&inner),
            (comm, worker.comm().world().clone()),
            plan.units.clone(),
            random.clone(),
            common,
        );
        schedule.set_unloaded(&later);
        let owners = InitOwners::new(&module, &plan, worker, &options)?;
        let setup = InitSetup {
            plan: &plan,
            loaded_later: later.iter().copied().collect(),
            schedule: schedule.clone(),
            worker,
            options: &options,
            random: &random,
            device: InitDevice::<B>::new(&device, inner, options.offload.storage_device()),
        };
        let mut init = ShardingInit::new(setup, owners);
        let module = module.map_params(&mut init);
        let module = init.finish(module)?;
        Ok(Fsdp {
            module,
            schedule,
            keys: Arc::new(plan.keys),
            ignored: Arc::new(plan.ignored),
            ignored_gradients: IgnoredGradients::default(),
            gradient_hook: GradientHook::default(),
            optimizer_check: OptimizerCheck::new(options.optimizer_check),
            optimizer_states: OptimizerStates::default(),
        })
    })
}

/// The decisions that a rank makes without the other ranks.
struct Planned {
    mesh: Mesh,
    plan: ModelPlan,
    /// The device that computes.
    device: Device,
}

impl Planned {
    fn new<M: HookedForward>(
        module: &M,
        worker: &Worker,
        options: &FsdpOptions,
    ) -> Result<Self, ShardError> {
        options.check()?;
        let mesh = options.mesh(worker.mesh(), worker.local_size())?;
        let plan = ModelPlan::new(module, mesh, options)?;
        let device = options.compute_device(&plan.device, worker.device());
        check_device(&device)?;
        options.check_offload(&plan.device, &device)?;
        options.policies().try_for_each(|policy| policy.check(&device))?;
        options.check_buffer_dtypes(&device)?;
        plan.check_dtypes(&device)?;
        Ok(Self { mesh, plan, device })
    }
}

/// Returns the settings of the schedule, and creates the process groups of the mesh. Every rank
/// calls it.
fn settings(
    worker: &Worker,
    options: &FsdpOptions,
    (mesh, plan): (Mesh, &ModelPlan),
    device: &Device,
) -> Result<Settings, Error> {
    // Groups are created by collectives, which all run on the communication thread.
    let world = worker.comm().world().clone();
    let groups = worker.comm().issue(move |_| MeshGroups::new(&world, mesh)).wait()?;
    let mut blocks = BTreeMap::new();
    for unit in &plan.units {
        if let ReshardAfterForward::To(size) = unit.control.reshard
            && let Entry::Vacant(entry) = blocks.entry(size)
        {
            entry.insert(block_group(worker.comm(), &groups.shard, mesh, size)?);
        }
    }
    Ok(Settings {
        strategy: options.strategy,
        mesh,
        groups,
        blocks,
        context_exchange: options.context_exchange,
        timing: Timing::new(&plan.units, options, DeviceKind::of(device)),
        gradient_divide_factor: options.gradient_divide_factor,
        storage: options.offload.storage_device(),
        keep_sent: options.offload == OffloadPolicy::OptimizerOnly,
        offload_activations: options.offload_activations,
        tables: plan.tables.clone(),
    })
}
