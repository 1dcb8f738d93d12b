//! The check of an optimizer that steps a sharded model for the first time.
//!
//! Burn passes a module to an optimizer as a [`ModuleMapper`], which shows neither the optimizer
//! nor its gradients. So the gradients that a backward pass returns contain those of a
//! [probe](super::optimizer_probe) of each sharded parameter, and the mapper steps the probes
//! before the model. A probe has the path of its parameter, and so belongs to the same parameter
//! group. The optimizer keeps the probes' state, a few hundred bytes, under ids of their own.

use std::any::type_name;
use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};

use super::optimizer_probe::{Part, Verdict};
use crate::backend::kernels::batched_steps;
use crate::error::{Error, IgnorePoison, ScheduleError};
use crate::module::Sharded;
use crate::param_group::{Placement, Unit};

/// The sharded parameters whose optimizer has not been checked. Clones of a model share them.
#[derive(Clone, Debug)]
pub(crate) struct OptimizerCheck(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Whether the option is off.
    off: bool,
    passed: HashSet<ParamId>,
    /// Parameters with a probe in the gradients of the last backward pass.
    waiting: Vec<Waiting>,
}

/// A sharded, trained parameter whose optimizer is still to be checked.
#[derive(Clone, Debug)]
pub(crate) struct Waiting {
    pub(crate) id: ParamId,
    /// Module path of the parameter.
    pub(crate) path: String,
    /// Device of the shard.
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
        checked.then(|| Self { id, path, device: base.device().inner() })
    }
}

/// Returns whether a visitor or mapper belongs to Burn's optimizers or to Burn's handling of
/// gradients.
fn is_of_optimizers<T>() -> bool {
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
        !state.off && !state.passed.contains(&id)
    }

    /// Returns whether the last backward pass has returned gradients of probes.
    #[cfg(feature = "train")]
    pub(crate) fn is_waiting(&self) -> bool {
        !self.0.lock().ignore_poison().waiting.is_empty()
    }

    /// Records that the optimizer of a parameter has passed the check.
    pub(crate) fn pass(&self, id: ParamId) {
        let mut state = self.0.lock().ignore_poison();
        state.passed.insert(id);
        state.waiting.retain(|waiting| waiting.id != id);
    }

    /// Adds the gradients of the probes to those of the model.
    pub(super) fn add_gradients(&self, waiting: Vec<Waiting>, gradients: &mut GradientsParams) {
        let mut cached: Option<(Device, [Tensor<2>; 3])> = None;
        for Waiting { id, device, .. } in &waiting {
            if cached.as_ref().is_none_or(|(of, _)| of != device) {
                cached = Some((device.clone(), Part::ALL.map(|part| part.gradient(device))));
            }
            let (_, probe) = cached.as_ref().expect("filled above");
            for (part, gradient) in Part::ALL.into_iter().zip(probe) {
                gradients.register(part.id(*id), gradient.clone());
            }
        }
        self.0.lock().ignore_poison().waiting = waiting;
    }

    /// Shows the probes to a visitor that sums gradients or moves them between devices.
    pub(super) fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        if !is_of_optimizers::<V>() {
            return;
        }
        let waiting = self.0.lock().ignore_poison().waiting.clone();
        for Waiting { id, device, .. } in waiting {
            for part in Part::ALL {
                visitor.visit_float(&Param::initialized(part.id(id), part.value(&device)));
            }
        }
    }

    /// Maps a sharded module. If the mapper is an optimizer, checks it before and after.
    pub(super) fn map<M: Module, T: ModuleMapper>(
        &self,
        module: M,
        mapper: &mut T,
        map: impl FnOnce(M, &mut T) -> M,
    ) -> Result<M, Error> {
        let waiting = self.0.lock().ignore_poison().waiting.clone();
        if waiting.is_empty() || !is_of_optimizers::<T>() {
            return Ok(map(module, mapper));
        }
        let mut silent = HashMap::new();
        for (waiting, verdict) in step_probes(waiting, mapper)? {
            refuse(verdict, &waiting.path)?;
            match verdict {
                Verdict::Silent => drop(silent.insert(waiting.id, waiting.path)),
                _ => self.pass(waiting.id),
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
    waiting: Vec<Waiting>,
    mapper: &mut T,
) -> Result<Vec<(Waiting, Verdict)>, Error> {
    let mut step = |waiting: &Waiting, part: Part| {
        mapper.enter_module(&waiting.path, "");
        let value = Tensor::from_inner(part.value(&waiting.device));
        let param = mapper.map_float(Param::initialized(part.id(waiting.id), value));
        mapper.exit_module(&waiting.path, "");
        param.into_value().inner()
    };
    // The scope ends before the results are read, since a step may be deferred to its end.
    let mut step = |waiting: &Waiting| {
        let parts = batched_steps::scope(|| Part::ALL.map(|part| step(waiting, part)));
        Verdict::of(&parts.map(read))
    };
    let mut verdicts = Vec::new();
    for waiting in waiting {
        let verdict = catch_step(|| step(&waiting))?;
        verdicts.push((waiting, verdict));
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
