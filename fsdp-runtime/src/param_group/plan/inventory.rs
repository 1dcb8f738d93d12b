//! The traversal that finds a module's units and parameters.

use std::any::type_name;
use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Tensor};

use super::super::tables::{FoundTable, is_cast};
use super::super::unit::{ParamSpec, Placement};
use super::found::{
    F32Module, Found, FoundGroup, FoundParam, FoundTie, FoundUnit, IgnoredParam, Key, SHARDED,
};
use super::groups::{Group, Position, group_sizes};
use super::recomputed_units::{not_recomputable, recomputes};
use super::wrapped_units::{wraps, wraps_field, wraps_group};
use crate::backend::check_device;
use crate::error::ShardError;
use crate::layout::StorageType;
use crate::module::{Child, FsdpModule, Node, ParamVisitor, Sharded, Tie, UnitType};
use crate::options::{ActivationCheckpointing, FsdpOptions, WrapPolicy};

/// A visitor that records every unit and parameter of a module.
///
/// It tracks the field path, the pretrained key and the unit of the traversal's position. It checks
/// each parameter as it comes, and reports the first error once the traversal ends.
#[derive(Debug)]
pub(super) struct Inventory<'a> {
    options: &'a FsdpOptions,
    found: Found,
    position: Position,
    /// Segments of the pretrained key, one for each field that leads to the position.
    key: Vec<String>,
    /// Whether the checkpoint stores each of these fields transposed.
    transposed: Vec<bool>,
    /// Names of the types at the position, outermost first, the model's included.
    type_names: Vec<&'static str>,
    /// Numbers of the units at the current position, outermost first. A module that the wrap policy
    /// merges into its enclosing unit repeats that unit's number.
    stack: Vec<usize>,
    /// Number of elements of each group, by path; empty if the wrap policy asks for no sizes.
    group_sizes: BTreeMap<String, usize>,
    /// First error of the traversal.
    error: Option<ShardError>,
}

impl<'a> Inventory<'a> {
    /// Returns the units and parameters of `module`.
    ///
    /// # Errors
    ///
    /// Returns the first reason not to shard the module.
    pub(super) fn collect<M: FsdpModule>(
        module: &M,
        options: &'a FsdpOptions,
    ) -> Result<Found, ShardError> {
        let mut inventory = Self {
            options,
            found: Found::default(),
            position: Position::default(),
            key: Vec::new(),
            transposed: Vec::new(),
            type_names: vec![M::LAYOUT.ty],
            stack: Vec::new(),
            group_sizes: match options.wrap {
                WrapPolicy::SizeBased { .. } => group_sizes(module),
                _ => BTreeMap::new(),
            },
            error: None,
        };
        inventory.add_root::<M>();
        module.visit_params(&mut inventory);
        match inventory.error {
            Some(error) => Err(error),
            None => Ok(inventory.found),
        }
    }

    /// Records the outermost unit.
    fn add_root<M: FsdpModule>(&mut self) {
        let unit_type = UnitType::of_module::<M>();
        // `All` excludes the outermost unit, whose recomputation would hold every activation again.
        let recomputed = match self.options.activation_checkpointing {
            ActivationCheckpointing::All => false,
            policy => recomputes::<M>(policy),
        };
        self.found.types.push(unit_type);
        self.found.units.push(FoundUnit {
            path: String::new(),
            ty: M::LAYOUT.ty,
            level: 0,
            field: false,
            unit_type: Some(unit_type),
            recomputed,
            within: None,
            params_before: 0,
            group: None,
        });
        self.stack.push(0);
        self.check_recomputable::<M>();
        self.add_ties(&M::LAYOUT);
    }

    /// Records the ties that the current module declares.
    fn add_ties(&mut self, node: &Node) {
        let prefix = |path: &str| {
            let here = self.position.join(&[]);
            if here.is_empty() { path.to_string() } else { format!("{here}.{path}") }
        };
        let found = |&Tie { first, second, if_shared }: &Tie| FoundTie {
            first: prefix(first),
            second: prefix(second),
            if_shared,
        };
        let ties: Vec<_> = node.ties.iter().map(found).collect();
        self.found.ties.extend(ties);
    }

    /// Enters a module that could be a unit: adds a unit if `wraps`, or else merges the module into
    /// the enclosing unit.
    fn enter_unit(
        &mut self,
        wraps: bool,
        ty: &'static str,
        unit_type: Option<UnitType>,
        recomputes: bool,
    ) {
        let enclosing = self.unit_number();
        if !wraps {
            self.stack.push(enclosing);
            return;
        }
        let within = self.recomputed_unit();
        self.stack.push(self.found.units.len());
        self.found.units.push(FoundUnit {
            path: self.position.join(&[]),
            ty,
            level: self.found.units[enclosing].level + 1,
            field: unit_type.is_none(),
            unit_type,
            recomputed: recomputes && within.is_none(),
            within,
            params_before: self.found.params.len(),
            group: None,
        });
    }

    /// Enters a module of a group of fields: adds the group's unit, unless an earlier module has, or
    /// merges the module into the enclosing unit unless `wraps`.
    fn enter_group(&mut self, wraps: bool, Group { name, path }: Group) {
        let enclosing = self.unit_number();
        if !wraps {
            self.stack.push(enclosing);
            return;
        }
        let is_known = |unit: &FoundUnit| unit.group.is_some() && unit.path == path;
        match self.found.units.iter().position(is_known) {
            Some(number) => self.stack.push(number),
            None => self.enter_unit(true, name, None, false),
        }
        let (number, until) = (self.unit_number(), self.found.units.len());
        let unit = &mut self.found.units[number];
        unit.path = path;
        let group = unit.group.get_or_insert(FoundGroup::new(enclosing));
        group.modules += 1;
        group.until = until;
    }

    /// Returns the number of the current module among those of its unit.
    fn module_number(&self) -> usize {
        let group = self.found.units[self.unit_number()].group.as_ref();
        group.map_or(0, |group| group.modules - 1)
    }

    /// Returns the number of the unit at the current position.
    fn unit_number(&self) -> usize {
        *self.stack.last().expect("the outermost unit is on the stack")
    }

    /// Returns the number of the recomputed unit at the current position, if there is one.
    fn recomputed_unit(&self) -> Option<usize> {
        let number = self.unit_number();
        let unit = &self.found.units[number];
        if unit.recomputed { Some(number) } else { unit.within }
    }

    /// Reports a recomputed unit whose forward cannot be recomputed. `M` is the type of the current
    /// unit.
    fn check_recomputable<M: FsdpModule>(&mut self) {
        let unit = &self.found.units[self.unit_number()];
        if unit.recomputed
            && let Some(error) = not_recomputable::<M>(&unit.name())
        {
            self.fail(error);
        }
    }

    /// Records an error, unless there is an earlier one.
    fn fail(&mut self, error: ShardError) {
        self.error.get_or_insert(error);
    }

    /// Returns the pretrained key of a parameter at `below`, a path below the current field.
    fn key_of(&self, below: &[String]) -> Key {
        let segments = self.key.iter().chain(below).filter(|segment| !segment.is_empty());
        Key {
            name: segments.map(String::as_str).collect::<Vec<_>>().join("."),
            transposed: self.transposed.last() == Some(&true) && below.is_empty(),
        }
    }

    /// Records a parameter that sharding leaves unchanged.
    fn add_ignored(&mut self, id: ParamId, path: String, key: Key, shape: Vec<usize>) {
        let entry = ParamSpec {
            path,
            split: None,
            is_shared: false,
            shape,
            dtype: DType::F32,
            reduce_dtype: DType::F32,
            placement: Placement::PerRank,
            storage: StorageType::F32,
            is_trained: true,
            codes: None,
            gradient_codes: None,
            segment: None,
        };
        self.found.ignored.push(IgnoredParam { id, key, spec: entry });
    }

    /// Records a parameter at `below`, a path below the current field.
    fn add_param<const D: usize>(&mut self, below: &[String], param: &Param<Tensor<D>>) {
        let path = self.position.join(below);
        let key = self.key_of(below);
        let shape = param.lazy_shape().as_slice().to_vec();
        let managed = !self.options.ignored_params.contains(&param.id);
        self.found.visited.push(managed.then_some(self.found.params.len()));
        if !managed {
            self.check_ignored(&path, param);
            return self.add_ignored(param.id, path, key, shape);
        }
        if let Some(error) = unshardable(&path, param) {
            return self.fail(error);
        }
        let device = param.lazy_device();
        if self.found.devices.iter().all(|(known, _)| *known != device) {
            self.found.devices.push((device, path.clone()));
        }
        let unit = self.unit_number();
        // A parameter that is not initialised yet gets this dtype when it is: f32.
        let dtype = if param.is_initialized() { param.base().dtype() } else { DType::F32 };
        let frozen = !is_trained(param, self.options.knows_frozen());
        let id = param.id;
        let module = self.module_number();
        let layer_split = self.position.split();
        let param = FoundParam {
            path,
            key,
            id,
            shape,
            layer_split,
            split: None,
            dtype,
            frozen,
            unit,
            module,
            tied_to: None,
        };
        self.found.params.push(param);
    }

    /// Reports an ignored parameter that appears in two fields, or that is trained in a recomputed
    /// unit.
    fn check_ignored<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if let Some(other) = self.found.ignored.iter().find(|other| other.id == param.id) {
            let other = other.spec.path.clone();
            self.fail(ShardError::IgnoredTie { ignored: path.to_string(), other });
        }
        if let Some(unit) = self.recomputed_unit().filter(|_| is_trained(param, true)) {
            let unit = self.found.units[unit].name();
            self.fail(ShardError::IgnoredInRecomputedUnit { unit, path: path.to_string() });
        }
    }
}

impl ParamVisitor for Inventory<'_> {
    fn enter(&mut self, child: &'static Child, index: Option<usize>) {
        self.position.enter(child, index);
        let key = index.map_or_else(|| child.key_or_name().to_string(), |index| index.to_string());
        self.key.push(key);
        self.transposed.push(child.transposed);
        self.type_names.push(child.node.type_name());
        self.add_ties(child.node.without_option());
    }

    fn exit(&mut self) {
        self.position.exit();
        self.key.pop();
        self.transposed.pop();
        self.type_names.pop();
    }

    fn unit<M: FsdpModule>(&mut self, module: &M) -> bool {
        let wraps = wraps(self.options.wrap, module);
        let recomputes = wraps && recomputes::<M>(self.options.activation_checkpointing);
        let unit_type = UnitType::of_module::<M>();
        self.found.types.push(unit_type);
        self.enter_unit(wraps, M::LAYOUT.ty, Some(unit_type), recomputes);
        if wraps {
            self.check_recomputable::<M>();
        }
        true
    }

    fn field_unit<M: Module>(&mut self, module: &M) -> bool {
        if let Some(group) = self.position.group().cloned() {
            let size = self.group_sizes.get(&group.path).copied().unwrap_or_default();
            self.enter_group(wraps_group(self.options.wrap, size), group);
            return true;
        }
        let ty = type_name::<M>().split('<').next().unwrap_or_default();
        let ty = ty.rsplit("::").next().unwrap_or_default();
        self.enter_unit(wraps_field(self.options.wrap, module), ty, None, false);
        true
    }

    fn unit_end(&mut self) {
        self.stack.pop();
    }

    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.add_param(&[], param);
    }

    fn leaf_param<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D>>) {
        self.add_param(path, param);
    }

    fn buffer<const D: usize>(&mut self, buffer: &Param<Tensor<D>>) {
        let (path, key) = (self.position.join(&[]), self.key_of(&[]));
        self.add_ignored(buffer.id, path, key, buffer.lazy_shape().as_slice().to_vec());
    }

    fn table<const D: usize>(&mut self, table: &Tensor<D>, in_device_dtype: bool) {
        let (path, unit, dtype) = (self.position.join(&[]), self.unit_number(), table.dtype());
        if is_cast(dtype) {
            let types = self.type_names.clone();
            self.found.tables.push(FoundTable { path, unit, types, dtype, in_device_dtype });
        }
    }

    fn leaf_reparameterized(&mut self, path: &[String], name: &str) {
        let (path, name) = (self.position.join(path), name.to_string());
        self.fail(ShardError::Reparameterized { path, name });
    }

    fn fixed(&mut self) {
        let path = self.position.join(&[]);
        self.fail(ShardError::NotFloat { path });
    }

    fn full_precision(&mut self, ty: &'static str) {
        let module = F32Module { unit: self.unit_number(), path: self.position.join(&[]), ty };
        self.found.f32_modules.push(module);
    }

    fn unrepeatable(&mut self, ty: &'static str, instead: &'static str) {
        if let Some(unit) = self.recomputed_unit() {
            let (unit, path) = (self.found.units[unit].name(), self.position.join(&[]));
            self.fail(ShardError::ModuleNotRecomputable { unit, path, ty, instead });
        }
    }
}

/// Returns whether a parameter requires a gradient, without initialising the parameter. On a device
/// without autodiff, where no parameter requires one, and on one that no backend of this crate serves,
/// returns `false` if `strict`, and else `true`.
fn is_trained<const D: usize>(param: &Param<Tensor<D>>, strict: bool) -> bool {
    let device = param.lazy_device();
    if !device.is_autodiff() || check_device(&device).is_err() {
        return !strict;
    }
    if param.is_initialized() {
        return param.base().is_require_grad();
    }
    let stand_in = Tensor::zeros([1; D], &device);
    param.clone().transform_for_load(stand_in, param.id).base().is_require_grad()
}

/// Returns the reason why a parameter cannot be sharded, if there is one.
fn unshardable<const D: usize>(path: &str, param: &Param<Tensor<D>>) -> Option<ShardError> {
    let path = path.to_string();
    if Sharded::of(param).is_some() {
        return Some(ShardError::AlreadySharded { path });
    }
    // Sharding keeps LoRA adapters.
    if let Some(name) = reparameterization(param)
        && Sharded::lora_of(param).is_none()
    {
        return Some(ShardError::Reparameterized { path, name });
    }
    // A parameter that is not initialised has no dtype yet; construction checks it later.
    let dtype = param.is_initialized().then(|| param.base().dtype())?;
    (!SHARDED.contains(&dtype)).then_some(ShardError::UnsupportedDtype { path, dtype })
}

/// Returns the name of a parameter's reparameterization, if it has one.
fn reparameterization<const D: usize>(param: &Param<Tensor<D>>) -> Option<String> {
    struct Name(Option<String>);

    impl ModuleVisitor for Name {
        fn enter_module(&mut self, name: &str, container: &str) {
            if container == "Reparameterization" {
                self.0 = Some(name.to_string());
            }
        }
    }

    let mut name = Name(None);
    param.visit(&mut name);
    name.0
}
