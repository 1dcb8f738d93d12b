//! The check of an optimizer in its first steps of a sharded model.
//!
//! Burn passes a module to an optimizer as a [`ModuleMapper`], which shows neither the optimizer
//! nor its gradients. So the gradients that a backward pass returns contain those of a
//! [probe](super::optimizer_probe) of each sharded parameter, and the mapper steps the probes
//! before the model. A probe has the path of its parameter, and so belongs to the same parameter
//! group. The optimizer keeps the probes' state under ids of their own, a few hundred bytes each.
//! Probes are in host memory, so that their state takes none of a device.
//!
//! After [`STEPS`] steps a parameter has passed, and later steps have no probe of it.
//!
//! A probe with [`Part::Wide`] takes 100 KiB for each moment of the optimizer. So only one
//! parameter of each kind has one: paths that differ in numbers only, such as those of the blocks
//! of a transformer, are one kind.

use std::any::type_name;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use fsdp_kernels::batched_steps;

use super::optimizer_probe::{Part, ProbeGradients, STEPS, Verdict};
use crate::backend::host_device;
use crate::error::{Error, IgnorePoison, ScheduleError};
use crate::module::Sharded;
use crate::param_group::memory::{OptimizerStates, reported};
use crate::param_group::probes::kind;
use crate::param_group::{Placement, Unit};

/// The sharded parameters whose optimizer has not been checked. Clones of a model share them.
#[derive(Clone, Debug)]
pub(crate) struct OptimizerCheck(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Whether the option is off.
    off: bool,
    /// Number of steps in which a parameter's optimizer has passed.
    passed: HashMap<ParamId, usize>,
    /// Parameter of each kind that has a full probe.
    full: HashMap<String, ParamId>,
    /// Probes in the gradients of the last backward pass.
    waiting: Vec<Probe>,
}

impl State {
    fn steps(&self, id: ParamId) -> usize {
        self.passed.get(&id).copied().unwrap_or(0)
    }

    /// Records that the optimizer of a parameter has passed a number of steps.
    fn pass(&mut self, id: ParamId, steps: usize) {
        self.passed.insert(id, steps);
        self.waiting.retain(|probe| probe.of.id != id);
    }
}

/// The probe of a parameter in one step.
#[derive(Clone, Debug)]
struct Probe {
    of: Waiting,
    step: usize,
    parts: &'static [Part],
}

/// A sharded, trained parameter whose optimizer is still to be checked.
#[derive(Clone, Debug)]
pub(crate) struct Waiting {
    pub(crate) id: ParamId,
    /// Module path of the parameter.
    pub(crate) path: String,
    /// Device of the probe.
    pub(crate) device: Device,
}

impl Waiting {
    /// Returns the description of a parameter, whether or not its shard is empty. `None` if the
    /// parameter is not sharded or not trained.
    pub(crate) fn of<const D: usize>(param: &Param<Tensor<D>>, units: &[Unit]) -> Option<Self> {
        let index = Sharded::of(param)?.index;
        let spec = &units[index.unit].params[index.param];
        let base = param.base();
        let checked = matches!(spec.placement, Placement::Shard(_)) && base.is_require_grad();
        let (id, path) = (param.id, spec.path.clone());
        checked.then(|| Self { id, path, device: host_device(&base.device().inner()) })
    }
}

/// Returns whether a visitor or mapper belongs to Burn's optimizers or to Burn's handling of
/// gradients.
pub(super) fn is_of_optimizers<T>() -> bool {
    type_name::<T>().starts_with("burn_optim::")
}

impl OptimizerCheck {
    /// Returns the check of a new model; `on` is the option.
    pub(super) fn new(on: bool) -> Self {
        Self(Arc::new(Mutex::new(State { off: !on, ..State::default() })))
    }

    /// Returns whether a parameter's optimizer has still to be checked.
    pub(crate) fn is_open(&self, id: ParamId) -> bool {
        let state = self.0.lock().ignore_poison();
        !state.off && state.steps(id) < STEPS
    }

    /// Returns whether the last backward pass has returned gradients of probes.
    #[cfg(feature = "train")]
    pub(crate) fn is_waiting(&self) -> bool {
        !self.0.lock().ignore_poison().waiting.is_empty()
    }

    /// Records that the optimizer of a parameter has passed the check.
    pub(crate) fn pass(&self, id: ParamId) {
        self.0.lock().ignore_poison().pass(id, STEPS);
    }

    /// Adds the gradients of the probes to those of the model.
    pub(super) fn add_gradients(&self, waiting: Vec<Waiting>, gradients: &mut GradientsParams) {
        let mut state = self.0.lock().ignore_poison();
        let mut shared = ProbeGradients::default();
        let mut probe = |of: Waiting| {
            let step = state.steps(of.id);
            let full = *state.full.entry(kind(&of.path)).or_insert(of.id) == of.id;
            let parts: &'static [Part] = if full { &Part::ALL } else { &Part::NARROW };
            for part in parts {
                gradients.register(part.id(of.id), shared.get(*part, step, &of.device));
            }
            Probe { of, step, parts }
        };
        let probes = waiting.into_iter().map(&mut probe).collect();
        state.waiting = probes;
    }

    /// Shows the probes to a visitor that sums gradients or moves them between devices.
    pub(super) fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        if !is_of_optimizers::<V>() {
            return;
        }
        let waiting = self.0.lock().ignore_poison().waiting.clone();
        for Probe { of: Waiting { id, device, .. }, parts, .. } in waiting {
            for part in parts {
                visitor.visit_float(&Param::initialized(part.id(id), part.value(&device)));
            }
        }
    }

    /// Maps a sharded module. If the mapper is an optimizer, checks it before and after.
    pub(super) fn map<M: Module, T: ModuleMapper>(
        &self,
        module: M,
        mapper: &mut T,
        states: &OptimizerStates,
        map: impl FnOnce(M, &mut T) -> M,
    ) -> Result<M, Error> {
        let waiting = self.0.lock().ignore_poison().waiting.clone();
        if waiting.is_empty() || !is_of_optimizers::<T>() {
            return Ok(map(module, mapper));
        }
        let mut silent = HashMap::new();
        for (Probe { of: Waiting { id, path, .. }, step, .. }, verdict) in
            step_probes(waiting, mapper, states)?
        {
            refuse(verdict, &path)?;
            match verdict {
                Verdict::Silent => drop(silent.insert(id, path)),
                _ => self.0.lock().ignore_poison().pass(id, step + 1),
            }
        }
        if silent.is_empty() {
            return Ok(map(module, mapper));
        }
        let before = Samples::of(&module, &silent);
        let module = map(module, mapper);
        let after = Samples::of(&module, &silent);
        match before.changed(&after) {
            Some(id) => {
                Err(ScheduleError::OptimizerNotChecked { path: silent[&id].clone() }.into())
            }
            None => Ok(module),
        }
    }
}

/// Returns the error for an optimizer that does not step shards as it steps whole parameters.
pub(crate) fn refuse(verdict: Verdict, path: &str) -> Result<(), ScheduleError> {
    let path = path.to_string();
    match verdict {
        Verdict::Silent | Verdict::ElementWise => Ok(()),
        Verdict::ClipsByNorm => Err(ScheduleError::OptimizerClipsByNorm { path }),
        Verdict::NeedsMatrix => Err(ScheduleError::OptimizerNeedsMatrix { path }),
    }
}

/// Steps the probes of all parameters, and judges them.
fn step_probes<T: ModuleMapper>(
    probes: Vec<Probe>,
    mapper: &mut T,
    states: &OptimizerStates,
) -> Result<Vec<(Probe, Verdict)>, Error> {
    let mut step = |of: &Waiting, part: Part| {
        mapper.enter_module(&of.path, "");
        let value = Tensor::from_inner(part.value(&of.device));
        let id = part.id(of.id);
        let (param, bytes) = reported(|| mapper.map_float(Param::initialized(id, value)));
        states.set_probe(id, bytes);
        mapper.exit_module(&of.path, "");
        param.into_value().inner()
    };
    // The scope ends before the results are read, since a step may be deferred to its end.
    let mut step = |Probe { of, parts, .. }: &Probe| {
        let parts: Vec<_> =
            batched_steps::scope(|| parts.iter().map(|part| step(of, *part)).collect());
        Verdict::of(&parts.into_iter().map(read).collect::<Vec<_>>())
    };
    let mut verdicts = Vec::new();
    for probe in probes {
        let verdict = catch_step(|| step(&probe))?;
        verdicts.push((probe, verdict));
    }
    Ok(verdicts)
}

/// Runs the steps of a probe. An optimizer that panics on the shape of a shard needs whole
/// matrices.
pub(crate) fn catch_step(step: impl FnOnce() -> Verdict) -> Result<Verdict, Error> {
    catch_unwind(AssertUnwindSafe(step)).or_else(|panic| match panic.downcast::<Error>() {
        Ok(error) => Err(*error),
        Err(_) => Ok(Verdict::NeedsMatrix),
    })
}

/// Returns the elements of a tensor.
pub(crate) fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// The first elements of some parameters, as bits: a parameter may contain NaN.
struct Samples<'a> {
    of: &'a HashMap<ParamId, String>,
    found: HashMap<ParamId, Vec<u32>>,
}

impl<'a> Samples<'a> {
    fn of<M: Module>(module: &M, of: &'a HashMap<ParamId, String>) -> Self {
        let mut samples = Self { of, found: HashMap::new() };
        module.visit(&mut samples);
        samples
    }

    /// Returns a parameter that differs in `after`.
    fn changed(&self, after: &Self) -> Option<ParamId> {
        let differs = |(id, sample): (&ParamId, &Vec<u32>)| {
            after.found.get(id).is_some_and(|other| other != sample).then_some(*id)
        };
        self.found.iter().filter_map(differs).min()
    }
}

impl ModuleVisitor for Samples<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        /// Number of elements that are compared.
        const ROWS: usize = 64;
        if self.of.contains_key(&param.id) {
            let base = param.base();
            let rows = base.dims()[0].min(ROWS);
            let bits = read(base.narrow(0, 0, rows)).into_iter().map(f32::to_bits);
            self.found.insert(param.id, bits.collect());
        }
    }
}
