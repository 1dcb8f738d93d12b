//! The tensors of a model that PEFT's file holds: the factors of the adapters, and the modules that
//! are trained in full.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use burn::module::{Param, ParamId};
use burn::tensor::Tensor;

use super::super::load_values::ParamTarget;
use super::names::{module_of, modules, modules_to_save, target_modules, tensor_name};
use crate::fully_shard::Fsdp;
use crate::module::{AdapterSettings, FsdpModule, ParamIndex, ParamVisitor, Sharded};
use crate::param_group::plan::Key;
use crate::param_group::{ParamSpec, Placement};

/// A tensor of PEFT's file.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeftTensor<'a> {
    /// The parameter of the model.
    pub(super) target: ParamTarget,
    /// Description of the parameter.
    pub(super) spec: &'a ParamSpec,
    /// Whether the file has the transpose of the parameter.
    pub(super) transposed: bool,
}

/// The tensors of PEFT's file by name, and the settings that describe them.
#[derive(Debug)]
pub(super) struct AdapterFiles<'a> {
    pub(super) tensors: BTreeMap<String, PeftTensor<'a>>,
    /// The adapters, in layout order. There is one at least.
    pub(super) adapters: Vec<PlannedAdapter<'a>>,
    /// Probability of dropping an element of an adapter's input.
    pub(super) dropout: f64,
    /// Whether an adapter's factor is alpha by the root of the rank.
    pub(super) rank_stabilised: bool,
    pub(super) target_modules: Vec<String>,
    pub(super) modules_to_save: Vec<String>,
    /// Whether the base model stores the adapted matrices as `[inputs, outputs]`, as `Conv1D` of
    /// transformers does.
    pub(super) fan_in_fan_out: bool,
}

/// An adapter of PEFT's file.
#[derive(Debug)]
pub(super) struct PlannedAdapter<'a> {
    pub(super) names: ModuleNames<'a>,
    pub(super) rank: usize,
    pub(super) alpha: f64,
    /// Factor of the product of the two factors.
    pub(super) factor: f64,
}

/// Names of a linear layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct ModuleNames<'a> {
    /// Module path.
    pub(super) path: &'a str,
    /// Key in a checkpoint.
    pub(super) key: &'a str,
}

impl<'a> AdapterFiles<'a> {
    /// Returns the plan of a model; it is the same on every rank.
    ///
    /// # Errors
    ///
    /// The reason why the model's adapters do not fit PEFT's format.
    pub(super) fn new<M: FsdpModule>(model: &'a Fsdp<M>) -> Result<Self, String> {
        let mut found =
            Found { model, params: Vec::new(), adapters: Vec::new(), factors: HashSet::new() };
        model.module.visit_params(&mut found);
        let Found { params, adapters, .. } = found;
        let Some(first) = adapters.first() else {
            return Err("it has none; attach them with `LoraConfig::apply` before sharding".into());
        };
        let (dropout, rank_stabilised) = (first.dropout(), first.is_rank_stabilised());
        if let Some(other) = adapters.iter().find(|adapter| {
            (adapter.dropout(), adapter.is_rank_stabilised()) != (dropout, rank_stabilised)
                || adapter.key.transposed != first.key.transposed
        }) {
            let (first, other) = (&first.key.name, &other.key.name);
            return Err(format!(
                "`{first}` and `{other}` differ in dropout, rsLoRA or orientation"
            ));
        }
        let adapted: BTreeSet<_> =
            adapters.iter().map(|adapter| module_of(&adapter.key.name)).collect();
        let trained: BTreeSet<_> = params
            .iter()
            .filter(|param| param.trained)
            .map(|param| module_of(&param.key.name))
            .collect();
        if let Some(module) = adapted.intersection(&trained).next() {
            return Err(format!(
                "`{module}` has an adapter, and parameters that are trained in full"
            ));
        }
        let keys = || params.iter().map(|param| param.key.name.as_str());
        let flags: Vec<_> =
            params.iter().map(|param| (param.key.name.as_str(), param.trained)).collect();
        let mut tensors = BTreeMap::new();
        for adapter in &adapters {
            let module = tensor_name(module_of(&adapter.key.name));
            for (name, factor) in [("lora_A", adapter.a), ("lora_B", adapter.b)] {
                tensors.insert(format!("{module}.{name}.weight"), factor);
            }
        }
        for param in params.iter().filter(|param| trained.contains(module_of(&param.key.name))) {
            tensors.insert(tensor_name(&param.key.name), param.tensor);
        }
        Ok(Self {
            adapters: adapters.iter().map(FoundAdapter::planned).collect(),
            dropout,
            rank_stabilised,
            target_modules: target_modules(&adapted, &modules(keys())),
            modules_to_save: modules_to_save(&flags),
            fan_in_fan_out: !first.key.transposed,
            tensors,
        })
    }
}

/// A parameter that is no factor of an adapter.
struct FoundParam<'a> {
    key: &'a Key,
    tensor: PeftTensor<'a>,
    /// Whether the parameter requires a gradient.
    trained: bool,
}

/// An adapter.
struct FoundAdapter<'a> {
    /// Key of the matrix.
    key: &'a Key,
    a: PeftTensor<'a>,
    b: PeftTensor<'a>,
    /// Path of the matrix.
    path: &'a str,
    scale: f64,
    /// Settings that Burn's adapter has no field for.
    settings: Option<AdapterSettings>,
}

impl<'a> FoundAdapter<'a> {
    fn dropout(&self) -> f64 {
        let dropout = self.settings.as_ref().and_then(|settings| settings.dropout.as_ref());
        dropout.map_or(0.0, |dropout| dropout.prob)
    }

    fn is_rank_stabilised(&self) -> bool {
        self.settings.as_ref().is_some_and(|settings| settings.rank_stabilised)
    }

    fn planned(&self) -> PlannedAdapter<'a> {
        let rank = self.a.spec.shape[1];
        let alpha = match &self.settings {
            Some(settings) => settings.alpha,
            None => rounded(self.scale * rank as f64),
        };
        let names = ModuleNames { path: module_of(self.path), key: module_of(&self.key.name) };
        PlannedAdapter { names, rank, alpha, factor: self.scale }
    }
}

/// Returns a number rounded to 14 digits: a quotient times its divisor is the dividend again.
fn rounded(number: f64) -> f64 {
    format!("{number:.13e}").parse().unwrap_or(number)
}

/// The visitor that finds adapters and other parameters.
struct Found<'a, M> {
    model: &'a Fsdp<M>,
    params: Vec<FoundParam<'a>>,
    adapters: Vec<FoundAdapter<'a>>,
    /// Factors of the adapters that were found.
    factors: HashSet<ParamId>,
}

impl<'a, M> Found<'a, M> {
    /// Returns a sharded or replicated parameter with its key.
    fn sharded(&self, index: ParamIndex) -> Option<(&'a Key, PeftTensor<'a>)> {
        let model = self.model;
        let spec = &model.schedule.units()[index.unit].params[index.param];
        let key = model.keys.get(&index)?;
        let tensor = PeftTensor {
            target: ParamTarget::Sharded(index),
            spec,
            transposed: key.transposed && spec.shape.len() == 2,
        };
        Some((key, tensor))
    }

    /// Returns a parameter of which each rank has its own values, with its key.
    fn per_rank(&self, id: ParamId) -> Option<(&'a Key, PeftTensor<'a>)> {
        let param = self.model.ignored.iter().find(|param| param.id == id)?;
        let transposed = param.key.transposed && param.spec.shape.len() == 2;
        let target = ParamTarget::PerRank(id);
        Some((&param.key, PeftTensor { target, spec: &param.spec, transposed }))
    }

    /// Returns a factor of an adapter. PEFT has the transposes of Burn's factors.
    fn factor(&mut self, param: &Param<Tensor<2>>) -> Option<PeftTensor<'a>> {
        self.factors.insert(param.id);
        let (_, tensor) = self.sharded(Sharded::of(param)?.index)?;
        Some(PeftTensor { transposed: true, ..tensor })
    }
}

impl<M> ParamVisitor for Found<'_, M> {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.factors.contains(&param.id) {
            return;
        }
        let found = match Sharded::of(param) {
            Some(sharded) => self.sharded(sharded.index),
            None => self.per_rank(param.id),
        };
        let Some((key, tensor)) = found else { return };
        // The owner of a tied parameter stands for it.
        if matches!(tensor.spec.placement, Placement::TiedTo(_)) {
            return;
        }
        if let Some(lora) = Sharded::lora_of(param)
            && let (Some(a), Some(b)) = (self.factor(&lora.a), self.factor(&lora.b))
        {
            let (path, scale) = (tensor.spec.path.as_str(), lora.scale);
            let settings = Sharded::lora_settings_of(param).cloned();
            self.adapters.push(FoundAdapter { key, a, b, path, scale, settings });
        }
        let trained = param.base().is_require_grad();
        self.params.push(FoundParam { key, tensor, trained });
    }

    fn buffer<const D: usize>(&mut self, buffer: &Param<Tensor<D>>) {
        if let Some((key, tensor)) = self.per_rank(buffer.id) {
            self.params.push(FoundParam { key, tensor, trained: false });
        }
    }
}
