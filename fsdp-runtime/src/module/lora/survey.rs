//! The traversal that lists a model's linear layers and modules.

use std::collections::{BTreeSet, HashMap};

use burn::module::{Module, Param, ParamId};
use burn::tensor::Tensor;
use regex::Regex;

use crate::error::LoraError;
use crate::module::{Child, FsdpModule, ModulePath, Node, ParamVisitor, Sharded, UnitType};

/// Name of the type of `burn::nn`'s linear layer.
const LINEAR: &str = "Linear";
/// Name of the matrix of a linear layer.
const WEIGHT: &str = "weight";

/// Names of a module or a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Names {
    /// Dotted path of field names.
    pub(super) path: String,
    /// Dotted key in a checkpoint of another framework.
    pub(super) key: String,
}

impl Names {
    /// Returns whether `name` is the path or the key, or whole segments at the end of one of them.
    fn end_in(&self, name: &str) -> bool {
        let ends = |whole: &str| {
            whole.strip_suffix(name).is_some_and(|start| start.is_empty() || start.ends_with('.'))
        };
        ends(&self.path) || ends(&self.key)
    }

    /// Returns the path with `*` for indices, followed by the key where that differs.
    pub(super) fn label(&self) -> String {
        let star = |name: &str| {
            let number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
            let segments = name.split('.').map(|part| if number(part) { "*" } else { part });
            segments.collect::<Vec<_>>().join(".")
        };
        match self.path == self.key {
            true => star(&self.path),
            false => format!("{} (in checkpoints {})", star(&self.path), star(&self.key)),
        }
    }

    /// Returns the path and the key.
    pub(super) fn both(&self) -> [&str; 2] {
        [&self.path, &self.key]
    }

    /// Returns the names of the module that encloses this one, if there is one.
    fn parent(&self) -> Option<Self> {
        let path = self.path.rsplit_once('.')?.0.to_string();
        let key = self.key.rsplit_once('.').map_or("", |(parent, _)| parent).to_string();
        Some(Self { path, key })
    }
}

/// A linear layer that can have an adapter.
#[derive(Debug)]
pub(super) struct LinearLayer {
    /// Names of the layer.
    pub(super) names: Names,
    /// Whether the layer applies an adapter to its input, in place of adding it to the matrix.
    pub(super) applies_adapters: bool,
    /// Types of the units that enclose the layer.
    units: Vec<UnitType>,
    /// Id of the matrix.
    weight: ParamId,
}

impl LinearLayer {
    /// Returns the path of the layer's matrix.
    pub(super) fn weight(&self) -> String {
        match self.names.path.is_empty() {
            true => WEIGHT.to_string(),
            false => format!("{}.{WEIGHT}", self.names.path),
        }
    }

    /// Returns whether a target names the layer.
    pub(super) fn is_named(&self, target: &str) -> bool {
        self.names.end_in(target)
    }

    /// Returns whether an expression matches the whole path or the whole checkpoint key of the layer.
    pub(super) fn matches(&self, pattern: &Regex) -> bool {
        self.names.both().iter().any(|name| pattern.is_match(name))
    }

    /// Returns whether the layer is in a unit of the type.
    pub(super) fn is_in(&self, unit: UnitType) -> bool {
        self.units.contains(&unit)
    }
}

/// The linear layers and parameters of a model.
#[derive(Debug, Default)]
pub(super) struct Survey {
    /// Linear layers whose matrix is not shared with another module.
    pub(super) layers: Vec<LinearLayer>,
    /// Parameters.
    params: Vec<Names>,
    path: ModulePath,
    key: Vec<String>,
    /// Whether the matrix that comes next is one of a layer that applies adapters.
    applies_adapters: bool,
    /// Type of each field from the root to the current position.
    types: Vec<&'static str>,
    /// Units at the current position; `None` for a field unit.
    units: Vec<Option<UnitType>>,
    /// Number of places of each parameter.
    places: HashMap<ParamId, usize>,
    /// Paths of the places that declared ties name.
    tied: Vec<String>,
    error: Option<LoraError>,
}

impl Survey {
    /// Lists the linear layers and parameters of `model`.
    ///
    /// # Errors
    ///
    /// [`LoraError::AlreadyAttached`] if a parameter has an adapter or is sharded.
    pub(super) fn of<M: FsdpModule>(model: &M) -> Result<Self, LoraError> {
        let mut survey = Self::default();
        survey.units.push(Some(UnitType::of_module::<M>()));
        survey.add_ties(&M::LAYOUT);
        model.visit_params(&mut survey);
        if let Some(error) = survey.error {
            return Err(error);
        }
        let Self { layers, places, tied, .. } = &mut survey;
        layers.retain(|layer| {
            let is_tied = |path: &String| *path == layer.names.path || *path == layer.weight();
            places[&layer.weight] == 1 && !tied.iter().any(is_tied)
        });
        Ok(survey)
    }

    /// Returns the paths of the parameters in the modules that `name` matches.
    fn params_in(&self, name: &str) -> Vec<String> {
        let within = |param: &&Names| {
            let mut module = Some((*param).clone());
            while let Some(names) = module {
                if names.end_in(name) {
                    return true;
                }
                module = names.parent();
            }
            false
        };
        self.params.iter().filter(within).map(|param| param.path.clone()).collect()
    }

    /// Returns the paths of the parameters in the modules that any name matches.
    ///
    /// # Errors
    ///
    /// The names that match no module, and the labels of all modules.
    pub(super) fn params_in_all(
        &self,
        names: &[String],
    ) -> Result<BTreeSet<String>, (Vec<String>, Vec<String>)> {
        let (mut found, mut unknown) = (BTreeSet::new(), Vec::new());
        for name in names {
            let params = self.params_in(name);
            if params.is_empty() {
                unknown.push(name.clone());
            }
            found.extend(params);
        }
        match unknown.is_empty() {
            true => Ok(found),
            false => Err((unknown, self.module_labels())),
        }
    }

    /// Returns the labels of the linear layers, each once.
    pub(super) fn layer_labels(&self) -> Vec<String> {
        let labels: BTreeSet<_> = self.layers.iter().map(|layer| layer.names.label()).collect();
        labels.into_iter().collect()
    }

    /// Returns the labels of the modules that have parameters, each once.
    fn module_labels(&self) -> Vec<String> {
        let modules = self.params.iter().filter_map(Names::parent);
        modules.map(|names| names.label()).collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn names(&self) -> Names {
        let key = self.key.iter().filter(|segment| !segment.is_empty());
        let key = key.map(String::as_str).collect::<Vec<_>>().join(".");
        Names { path: self.path.join(&[]), key }
    }

    fn add_ties(&mut self, node: &Node) {
        // Clones are counted in any case.
        for tie in node.ties.iter().filter(|tie| !tie.if_shared) {
            for place in [tie.first, tie.second] {
                self.tied.push(self.path.join(&[place.to_string()]));
            }
        }
    }

    /// Returns whether the current parameter is the matrix of a linear layer.
    fn in_linear(&self) -> bool {
        let weight = self.path.segments().last().is_some_and(|name| name == WEIGHT);
        let module = self.types.len().checked_sub(2).map(|index| self.types[index]);
        weight && module == Some(LINEAR)
    }
}

impl ParamVisitor for Survey {
    fn enter(&mut self, child: &'static Child, index: Option<usize>) {
        self.path.enter(child, index);
        let key = index.map_or_else(|| child.key_or_name().to_string(), |index| index.to_string());
        self.key.push(key);
        let node = child.node.without_option();
        self.types.push(node.ty);
        self.add_ties(node);
    }

    fn exit(&mut self) {
        self.path.exit();
        self.key.pop();
        self.types.pop();
    }

    fn unit<M: FsdpModule>(&mut self, _: &M) -> bool {
        self.units.push(Some(UnitType::of_module::<M>()));
        true
    }

    fn field_unit<M: Module>(&mut self, _: &M) -> bool {
        self.units.push(None);
        true
    }

    fn unit_end(&mut self) {
        self.units.pop();
    }

    fn applies_adapters(&mut self) {
        self.applies_adapters = true;
    }

    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let names = self.names();
        let attached = match (Sharded::of(param), Sharded::lora_of(param)) {
            (Some(_), _) => Some("is sharded"),
            (_, Some(_)) => Some("has an adapter"),
            _ => None,
        };
        if let Some(reason) = attached {
            let path = names.path.clone();
            self.error.get_or_insert(LoraError::AlreadyAttached { path, reason });
        }
        *self.places.entry(param.id).or_default() += 1;
        if D == 2 && self.in_linear() {
            let units = self.units.iter().copied().flatten().collect();
            let names = names.parent().unwrap_or(Names { path: String::new(), key: String::new() });
            let applies_adapters = std::mem::take(&mut self.applies_adapters);
            self.layers.push(LinearLayer { names, applies_adapters, units, weight: param.id });
        }
        self.params.push(names);
    }
}
