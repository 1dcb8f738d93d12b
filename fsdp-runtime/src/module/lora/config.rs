//! The configuration of LoRA adapters.

use std::collections::BTreeSet;

use super::attach::Attach;
use super::survey::{LinearLayer, Survey};
use crate::error::LoraError;
use crate::module::{FsdpModule, ModulePath, UnitType};

/// LoRA adapters for the linear layers of a model, as in Hugging Face's PEFT.
///
/// An adapter adds `alpha / rank · (a @ b)` to a matrix of shape `[inputs, outputs]`, with trained
/// factors `a` of shape `[inputs, rank]` and `b` of shape `[rank, outputs]` ([LoRA], section 4.1).
/// `a` is initialised as in PEFT, uniformly within `±1 / sqrt(inputs)`, and `b` with zeros: the
/// model's outputs do not change at first. Parameters are not initialised by attaching adapters.
///
/// [LoRA]: https://arxiv.org/abs/2106.09685
///
/// # Example
///
/// ```
/// use burn::module::Module;
/// use burn::tensor::{Device, Tensor};
/// use fsdp_runtime::prelude::*;
/// use fsdp_runtime::errors::LoraError;
/// use fsdp_runtime::lora::LoraConfig;
/// use fsdp_runtime::nn::{Linear, LinearConfig};
///
/// #[derive(Module, Debug)]
/// #[fsdp_unit(root)]
/// struct Net {
///     query: Linear,
///     classifier: Linear,
/// }
///
/// #[fsdp_unit]
/// impl Net {
///     pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         self.classifier.forward(self.query.forward(x))
///     }
/// }
///
/// let device = Device::flex();
/// let linear = || LinearConfig::new(8, 8).init(&device);
/// let net = Net { query: linear(), classifier: linear() };
/// let lora = LoraConfig::new(4)
///     .with_alpha(8.0)
///     .with_target_modules(["query"])
///     .with_modules_to_save(["classifier"]);
/// // `fully_shard` comes next.
/// let net = lora.apply(net)?;
/// assert_eq!(net.query.weight.adapter().unwrap().scale, 2.0);
/// assert!(net.classifier.weight.adapter().is_none());
/// # Ok::<_, LoraError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct LoraConfig {
    rank: usize,
    alpha: f64,
    target_modules: Vec<String>,
    target_units: Vec<UnitType>,
    modules_to_save: Vec<String>,
}

impl LoraConfig {
    /// Returns adapters of a rank for every linear layer, with an alpha equal to the rank.
    pub fn new(rank: usize) -> Self {
        Self {
            rank,
            alpha: rank as f64,
            target_modules: Vec::new(),
            target_units: Vec::new(),
            modules_to_save: Vec::new(),
        }
    }

    /// Sets the numerator of the factor `alpha / rank` of an adapter.
    pub fn with_alpha(mut self, alpha: f64) -> Self {
        self.alpha = alpha;
        self
    }

    /// Restricts adapters to the linear layers that a name matches. A name is the last segments of
    /// the layer's module path, or of its checkpoint key: `query` or `attention.query` of the field
    /// `layers.0.attention.query`, and `self.query` where the key is `attention.self.query`.
    pub fn with_target_modules<S: Into<String>>(
        mut self,
        names: impl IntoIterator<Item = S>,
    ) -> Self {
        self.target_modules = names.into_iter().map(Into::into).collect();
        self
    }

    /// Restricts adapters to the linear layers in units of these types, directly or below:
    /// `unit_types![BertLayer]`. Target modules restrict them further.
    pub fn with_target_units(mut self, units: &[UnitType]) -> Self {
        self.target_units = units.to_vec();
        self
    }

    /// Keeps modules trained in full, such as a new head. A name matches as in
    /// [`with_target_modules`](Self::with_target_modules), and stands for all parameters in the
    /// module. These modules get no adapters, and are saved with the adapters.
    pub fn with_modules_to_save<S: Into<String>>(
        mut self,
        names: impl IntoIterator<Item = S>,
    ) -> Self {
        self.modules_to_save = names.into_iter().map(Into::into).collect();
        self
    }

    /// Returns the rank of the adapters.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the numerator of the factor `alpha / rank`.
    pub fn alpha(&self) -> f64 {
        self.alpha
    }

    /// Returns the names of the target modules; none stands for every linear layer.
    pub fn target_modules(&self) -> &[String] {
        &self.target_modules
    }

    /// Returns the names of the modules that are trained in full.
    pub fn modules_to_save(&self) -> &[String] {
        &self.modules_to_save
    }

    /// Attaches adapters to a model that is not sharded yet, and freezes all other parameters but
    /// those of the modules to save.
    ///
    /// Linear layers are [`nn::Linear`](crate::nn::Linear) and [`burn::nn::Linear`] in fields that
    /// sharding knows: not those in a field under `#[fsdp(leaf)]`, and not those whose matrix is tied to
    /// another module's.
    ///
    /// # Errors
    ///
    /// [`LoraError`] for a rank of 0, an alpha that is not above 0, a name or a unit type that
    /// matches nothing, and a model with adapters.
    pub fn apply<M: FsdpModule>(&self, model: M) -> Result<M, LoraError> {
        if self.rank == 0 {
            return Err(LoraError::Rank);
        }
        if !(self.alpha.is_finite() && self.alpha > 0.0) {
            return Err(LoraError::Alpha { alpha: self.alpha });
        }
        let survey = Survey::of(&model)?;
        let trained = self.trained(&survey)?;
        let adapted = self.adapted(&survey, &trained)?;
        Ok(model.map_params(&mut Attach {
            rank: self.rank,
            scale: self.alpha / self.rank as f64,
            adapted,
            trained,
            path: ModulePath::default(),
        }))
    }

    /// Returns the paths of the parameters that are trained in full.
    fn trained(&self, survey: &Survey) -> Result<BTreeSet<String>, LoraError> {
        let (mut trained, mut unknown) = (BTreeSet::new(), Vec::new());
        for name in &self.modules_to_save {
            let params = survey.params_in(name);
            if params.is_empty() {
                unknown.push(name.clone());
            }
            trained.extend(params);
        }
        match unknown.is_empty() {
            true => Ok(trained),
            false => Err(LoraError::ModulesToSave {
                modules: unknown,
                candidates: survey.module_labels(),
            }),
        }
    }

    /// Returns the paths of the matrices that get an adapter.
    fn adapted(
        &self,
        survey: &Survey,
        trained: &BTreeSet<String>,
    ) -> Result<BTreeSet<String>, LoraError> {
        let in_targets = |layer: &&LinearLayer| {
            self.target_units.is_empty() || self.target_units.iter().any(|&unit| layer.is_in(unit))
        };
        let is_named = |layer: &&LinearLayer| {
            self.target_modules.is_empty()
                || self.target_modules.iter().any(|name| layer.is_named(name))
        };
        let layers = survey.layers.iter().filter(|layer| !trained.contains(&layer.weight()));
        let layers: Vec<&LinearLayer> = layers.collect();
        let in_units: Vec<&LinearLayer> = layers.iter().copied().filter(in_targets).collect();

        let units = self.target_units.iter();
        let units = units.filter(|unit| !layers.iter().any(|layer| layer.is_in(**unit)));
        let names = self.target_modules.iter();
        let names = names.filter(|name| !in_units.iter().any(|layer| layer.is_named(name)));
        let mut unmatched: Vec<String> =
            units.map(|unit| unit.name().to_string()).chain(names.cloned()).collect();
        if layers.is_empty() && unmatched.is_empty() {
            unmatched.push("all-linear".into());
        }
        if unmatched.is_empty() {
            return Ok(in_units.into_iter().filter(is_named).map(LinearLayer::weight).collect());
        }
        Err(LoraError::Targets { targets: unmatched, candidates: survey.layer_labels() })
    }
}
