//! The walk that finds a model's units and parameters.

use std::any::type_name;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Device, Tensor};

use super::wraps::{wraps, wraps_field};
use super::{IgnoredParam, Key, SHARDED};
use crate::error::ShardError;
use crate::module::Sharded;
use crate::module::UnitType;
use crate::module::{Child, FsdpModule, Kind, Node, ParamVisitor};
use crate::options::{ActivationCheckpointing, FsdpOptions};
use crate::param_group::{ParamSpec, Placement};

/// One parameter found.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) path: String,
    pub(super) key: Key,
    pub(super) id: ParamId,
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    pub(super) unit: usize,
    pub(super) tied_to: Option<usize>,
}

/// One unit found.
#[derive(Debug)]
pub(super) struct FoundUnit {
    pub(super) path: String,
    pub(super) ty: &'static str,
    pub(super) level: usize,
    pub(super) field: bool,
    /// The type of a unit that is one by its annotation.
    pub(super) unit_type: Option<UnitType>,
    pub(super) checkpointed: bool,
    pub(super) within: Option<usize>,
}

impl FoundUnit {
    /// Its path, quoted for messages.
    pub(super) fn name(&self) -> String {
        if self.path.is_empty() { "(root)".to_string() } else { format!("`{}`", self.path) }
    }
}

/// The walk that finds everything.
#[derive(Debug)]
pub(super) struct Inventory<'a> {
    pub(super) options: &'a FsdpOptions,
    /// The types under `#[fsdp_unit]` that were found, units under the wrap policy or not.
    pub(super) types: Vec<UnitType>,
    pub(super) left_alone: Vec<IgnoredParam>,
    /// The item of each parameter found; `None` for one that is left alone.
    pub(super) order: Vec<Option<usize>>,
    path: Vec<String>,
    key: Vec<String>,
    transposed: Vec<bool>,
    pub(super) units: Vec<FoundUnit>,
    stack: Vec<usize>,
    pub(super) items: Vec<Item>,
    /// Full paths of tied places.
    pub(super) ties: Vec<(String, String)>,
    /// The devices, each with the first parameter there.
    pub(super) devices: Vec<(Device, String)>,
    /// What computes in f32 whatever its unit does: the unit, the path, the type.
    pub(super) full_precision: Vec<(usize, String, &'static str)>,
    error: Option<ShardError>,
}

impl<'a> Inventory<'a> {
    /// Everything that `module` holds, or the first reason not to shard it.
    pub(super) fn of<M: FsdpModule>(
        module: &M,
        options: &'a FsdpOptions,
    ) -> Result<Self, ShardError> {
        let mut inventory = Self {
            options,
            types: vec![UnitType::of_module::<M>()],
            left_alone: Vec::new(),
            order: Vec::new(),
            path: Vec::new(),
            key: Vec::new(),
            transposed: Vec::new(),
            units: Vec::new(),
            stack: vec![0],
            items: Vec::new(),
            ties: Vec::new(),
            devices: Vec::new(),
            full_precision: Vec::new(),
            error: None,
        };
        let checkpointed = match options.activation_checkpointing {
            ActivationCheckpointing::All => false,
            _ => inventory.checkpoints::<M>(),
        };
        inventory.units.push(FoundUnit {
            path: String::new(),
            ty: M::LAYOUT.ty,
            level: 0,
            field: false,
            unit_type: Some(UnitType::of_module::<M>()),
            checkpointed,
            within: None,
        });
        inventory.can_be_recomputed::<M>(0);
        inventory.declare(&M::LAYOUT);
        module.visit_params(&mut inventory);
        match inventory.error.take().or_else(|| inventory.named_in_vain(&M::LAYOUT)) {
            Some(error) => Err(error),
            None => Ok(inventory),
        }
    }

    fn join(&self, below: &[String]) -> String {
        let parts: Vec<&str> = self.path.iter().chain(below).map(String::as_str).collect();
        parts.join(".")
    }

    fn declare(&mut self, node: &Node) {
        let prefix = |path: &str| {
            let here = self.join(&[]);
            if here.is_empty() { path.to_string() } else { format!("{here}.{path}") }
        };
        let ties: Vec<_> =
            node.ties.iter().map(|tie| (prefix(tie.first), prefix(tie.second))).collect();
        self.ties.extend(ties);
    }

    /// Goes into a module that is a unit, or joins the unit around it.
    fn open(
        &mut self,
        wraps: bool,
        ty: &'static str,
        unit_type: Option<UnitType>,
        checkpoints: bool,
    ) {
        let around = self.current();
        if wraps {
            let level = self.units[around].level + 1;
            let within = self.checkpointed();
            let checkpointed = checkpoints && within.is_none();
            self.stack.push(self.units.len());
            let (path, field) = (self.join(&[]), unit_type.is_none());
            let found = FoundUnit { path, ty, level, field, unit_type, checkpointed, within };
            self.units.push(found);
        } else {
            self.stack.push(around);
        }
    }

    /// The unit that the walk is in.
    pub(super) fn current(&self) -> usize {
        *self.stack.last().expect("the outermost unit is on the stack")
    }

    pub(super) fn fail(&mut self, error: ShardError) {
        self.error.get_or_insert(error);
    }

    fn key_of(&self, below: &[String]) -> Key {
        let segments = self.key.iter().chain(below).filter(|segment| !segment.is_empty());
        Key {
            name: segments.map(String::as_str).collect::<Vec<_>>().join("."),
            transposed: self.transposed.last() == Some(&true) && below.is_empty(),
        }
    }

    fn leave_alone(&mut self, id: ParamId, path: String, key: Key, shape: Vec<usize>) {
        let (dtype, reduce_dtype) = (DType::F32, DType::F32);
        let entry =
            ParamSpec { path, shape, dtype, reduce_dtype, held: Placement::PerRank, segment: None };
        self.left_alone.push(IgnoredParam { id, key, entry });
    }

    fn found<const D: usize>(&mut self, below: &[String], param: &Param<Tensor<D>>) {
        let path = self.join(below);
        let key = self.key_of(below);
        let shape = param.lazy_shape().as_slice().to_vec();
        let managed = !self.options.ignored.contains(&param.id);
        self.order.push(managed.then_some(self.items.len()));
        if !managed {
            if let Some(other) = self.left_alone.iter().find(|other| other.id == param.id) {
                let other = other.entry.path.clone();
                self.fail(ShardError::IgnoredTie { ignored: path.clone(), other });
            }
            if let Some(unit) = self.checkpointed().filter(|_| trains(param)) {
                let (unit, path) = (self.units[unit].name(), path.clone());
                self.fail(ShardError::IgnoredInCheckpoint { unit, path });
            }
            return self.leave_alone(param.id, path, key, shape);
        }
        if let Some(error) = unshardable(&path, param) {
            return self.fail(error);
        }
        let device = param.lazy_device();
        if self.devices.iter().all(|(known, _)| *known != device) {
            self.devices.push((device, path.clone()));
        }
        let unit = self.current();
        // One that is not initialised takes the type it is drawn in to f32.
        let dtype = if param.is_initialized() { param.base().dtype() } else { DType::F32 };
        self.items.push(Item { path, key, id: param.id, shape, dtype, unit, tied_to: None });
    }
}

impl ParamVisitor for Inventory<'_> {
    fn enter(&mut self, child: &'static Child, index: Option<usize>) {
        let name = index.map_or_else(|| child.name.to_string(), |index| index.to_string());
        let key = match index {
            Some(_) => name.clone(),
            None => child.key_or_name().to_string(),
        };
        self.path.push(name);
        self.key.push(key);
        self.transposed.push(child.transposed);
        let mut node = child.node;
        while node.kind == Kind::Optional {
            node = node.children[0].node;
        }
        self.declare(node);
    }

    fn exit(&mut self) {
        self.path.pop();
        self.key.pop();
        self.transposed.pop();
    }

    fn unit<M: FsdpModule>(&mut self, module: &M) -> bool {
        let wraps = wraps(self.options.wrap, module);
        let checkpoints = wraps && self.checkpoints::<M>();
        let unit_type = UnitType::of_module::<M>();
        self.types.push(unit_type);
        self.open(wraps, M::LAYOUT.ty, Some(unit_type), checkpoints);
        if wraps {
            self.can_be_recomputed::<M>(self.current());
        }
        true
    }

    fn field_unit<M: Module>(&mut self, module: &M) -> bool {
        let ty = type_name::<M>().split('<').next().unwrap_or_default();
        let ty = ty.rsplit("::").next().unwrap_or_default();
        self.open(wraps_field(self.options.wrap, module), ty, None, false);
        true
    }

    fn unit_end(&mut self) {
        self.stack.pop();
    }

    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.found(&[], param);
    }

    fn leaf_param<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D>>) {
        self.found(path, param);
    }

    fn buffer<const D: usize>(&mut self, buffer: &Param<Tensor<D>>) {
        let (path, key) = (self.join(&[]), self.key_of(&[]));
        self.leave_alone(buffer.id, path, key, buffer.lazy_shape().as_slice().to_vec());
    }

    fn leaf_reparameterized(&mut self, path: &[String], name: &str) {
        let (path, name) = (self.join(path), name.to_string());
        self.fail(ShardError::Reparameterized { path, name });
    }

    fn fixed(&mut self) {
        let path = self.join(&[]);
        self.fail(ShardError::NotFloat { path });
    }

    fn full_precision(&mut self, ty: &'static str) {
        self.full_precision.push((self.current(), self.join(&[]), ty));
    }

    fn unrepeatable(&mut self, ty: &'static str, instead: &'static str) {
        if let Some(unit) = self.checkpointed() {
            let (unit, path) = (self.units[unit].name(), self.join(&[]));
            self.fail(ShardError::Unrepeatable { unit, path, ty, instead });
        }
    }
}

/// Whether a parameter has a gradient, told without initialising it.
fn trains<const D: usize>(param: &Param<Tensor<D>>) -> bool {
    let stand_in = Tensor::zeros([1; D], &param.lazy_device());
    param.clone().transform_for_load(stand_in, param.id).base().is_require_grad()
}

fn unshardable<const D: usize>(path: &str, param: &Param<Tensor<D>>) -> Option<ShardError> {
    let path = path.to_string();
    if Sharded::of(param).is_some() {
        return Some(ShardError::AlreadySharded { path });
    }
    let mut other = OtherReparameterization(None);
    param.visit(&mut other);
    // A LoRA adapter goes along.
    if let Some(name) = other.0
        && param.adapter().is_none()
    {
        return Some(ShardError::Reparameterized { path, name });
    }
    // One that is not initialised has no dtype yet; it is checked once it is.
    let dtype = param.is_initialized().then(|| param.base().dtype())?;
    (!SHARDED.contains(&dtype)).then_some(ShardError::UnsupportedDtype { path, dtype })
}

/// The name of any reparameterization on the parameter visited.
struct OtherReparameterization(Option<String>);

impl ModuleVisitor for OtherReparameterization {
    fn enter_module(&mut self, name: &str, container: &str) {
        if container == "Reparameterization" {
            self.0 = Some(name.to_string());
        }
    }
}
