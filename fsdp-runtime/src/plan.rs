//! What a model holds: its units and parameters with their paths and keys, found by one walk over
//! the module, and every reason not to shard it.

mod checkpointed;
mod ties;
mod wraps;

use std::any::type_name;
use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Device, Tensor};

use self::ties::{shared, tie};
use self::wraps::{wraps, wraps_field};
use crate::error::ShardError;
use crate::group::{Entry, Held, Unit};
use crate::kernels::computes;
use crate::mesh::Mesh;
use crate::options::{ActivationCheckpointing, FsdpOptions, WrapPolicy};
use crate::param::{Place, Sharded};
use crate::precision::computed;
use crate::unit::{Child, FsdpModule, Kind, Node, Walk};
use crate::unit_layout::UnitLayout;
use crate::unit_type::UnitType;

/// A parameter's name in a checkpoint from elsewhere, and whether it lies transposed there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) name: String,
    pub(crate) transposed: bool,
}

/// The types that parameters may have; whatever it is, they rest in f32.
pub(crate) const SHARDED: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// One parameter found.
#[derive(Debug)]
struct Item {
    path: String,
    key: Key,
    id: ParamId,
    shape: Vec<usize>,
    dtype: DType,
    unit: usize,
    tied_to: Option<usize>,
}

/// What is left alone: whole, and each rank's own. A parameter that is ignored, or a running statistic.
#[derive(Clone, Debug)]
pub(crate) struct IgnoredParam {
    pub(crate) id: ParamId,
    pub(crate) key: Key,
    pub(crate) entry: Entry,
}

#[derive(Debug)]
struct FoundUnit {
    path: String,
    ty: &'static str,
    level: usize,
    field: bool,
    /// The type of a unit that is one by its annotation.
    unit_type: Option<UnitType>,
    checkpointed: bool,
    within: Option<usize>,
}

impl FoundUnit {
    /// Its path, quoted for messages.
    fn name(&self) -> String {
        if self.path.is_empty() { "(root)".to_string() } else { format!("`{}`", self.path) }
    }
}

/// A model's units and parameters.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The units, in layout order, without slots.
    pub(crate) units: Vec<Unit>,
    /// The parameters, in the order of the walk; `None` for one that is ignored.
    pub(crate) places: Vec<Option<Place>>,
    /// The checkpoint key of each place.
    pub(crate) keys: BTreeMap<Place, Key>,
    /// What is not sharded, and each rank has for itself.
    pub(crate) ignored: Vec<IgnoredParam>,
    /// The one device they lie on.
    pub(crate) device: Device,
}

impl Plan {
    /// Lays out `module` for a rank.
    pub(crate) fn new<M: FsdpModule>(
        module: &M,
        mesh: Mesh,
        options: &FsdpOptions,
    ) -> Result<Self, ShardError> {
        let mut inventory = Inventory {
            wrap: options.wrap,
            checkpointing: options.activation_checkpointing,
            ignored: options.ignored.clone(),
            ..Inventory::default()
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
        inventory.stack.push(0);
        inventory.can_be_replayed::<M>(0);
        inventory.declare(&M::LAYOUT);
        module.walk(&mut inventory);
        inventory.found_all_checkpointed();
        if let Some(error) = inventory.error {
            return Err(error);
        }
        let Inventory { mut items, order, units, ties, devices, ignored, left_alone, .. } =
            inventory;
        if let Some(id) = ignored.first() {
            return Err(ShardError::InvalidOption {
                option: "ignored_params",
                value: id.to_string(),
                expected: "use the ids of parameters of this model".into(),
            });
        }
        if items.is_empty() {
            return Err(ShardError::EmptyModel { model: M::LAYOUT.ty });
        }
        tie(&mut items, &ties)?;
        shared(&items)?;
        let device = match devices.as_slice() {
            [device] => device.clone(),
            devices => {
                return Err(ShardError::SeveralDevices {
                    count: devices.len(),
                    devices: devices
                        .iter()
                        .map(|device| format!("{device:?}"))
                        .collect::<Vec<_>>()
                        .join(", "),
                });
            }
        };
        let (units, places) = Self::lay_out(&items, units, mesh, options);
        let keys = items.into_iter().zip(&places).map(|(item, place)| (*place, item.key)).collect();
        let places = order.into_iter().map(|item| item.map(|item| places[item])).collect();
        Ok(Self { units, places, keys, ignored: left_alone, device })
    }

    /// That the device computes in the types that parameters are gathered in: those of a policy, or
    /// those they were initialised in.
    pub(crate) fn check_dtypes(&self, device: &Device) -> Result<(), ShardError> {
        for entry in self.units.iter().flat_map(|unit| &unit.entries) {
            if !computes(device, entry.dtype.into()) {
                return Err(ShardError::DtypeNotComputed {
                    path: entry.path.clone(),
                    dtype: entry.dtype,
                    device: format!("{device:?}"),
                    computed: computed(device).join(", "),
                });
            }
        }
        Ok(())
    }

    /// The units, and the place of each item.
    fn lay_out(
        items: &[Item],
        found: Vec<FoundUnit>,
        mesh: Mesh,
        options: &FsdpOptions,
    ) -> (Vec<Unit>, Vec<Place>) {
        // Each item's position within its unit, in the order of the walk.
        let mut counts = vec![0; found.len()];
        let places: Vec<Place> = items
            .iter()
            .map(|item| {
                let entry = counts[item.unit];
                counts[item.unit] += 1;
                Place { unit: item.unit, entry }
            })
            .collect();
        let units = found
            .into_iter()
            .enumerate()
            .map(|(index, unit)| {
                let own: Vec<&Item> = items.iter().filter(|item| item.unit == index).collect();
                let is_matrix = |item: &&&Item| {
                    let numel: usize = item.shape.iter().product();
                    item.tied_to.is_none()
                        && item.shape.len() >= 2
                        && numel >= options.persist_below.max(1)
                };
                let policy = options.policy(unit.unit_type);
                let dtype_of = |item: &Item| policy.param().unwrap_or(item.dtype);
                let matrices = own.iter().filter(is_matrix);
                let matrices =
                    matrices.map(|item| (dtype_of(item), item.shape.iter().product::<usize>()));
                let layout = UnitLayout::new(matrices, mesh.shard_size());
                let mut segments = 0..;
                let common = match layout.ranges() {
                    // Vectors alone.
                    [] => Some(policy.param().unwrap_or(DType::F32)),
                    _ => layout.dtype(),
                };
                let entries: Vec<Entry> = own
                    .iter()
                    .map(|item| {
                        let segment = if is_matrix(&item) { segments.next() } else { None };
                        let held = match (item.tied_to, segment, options.strategy) {
                            (Some(first), ..) => Held::TiedTo(places[first].entry),
                            (None, Some(segment), strategy) if strategy.shards() => {
                                Held::Fragment(layout.fragment(segment, mesh.shard_rank()))
                            }
                            _ => Held::Whole,
                        };
                        let (path, shape) = (item.path.clone(), item.shape.clone());
                        let dtype = dtype_of(item);
                        let reduce_dtype = policy.reduce(common, dtype);
                        Entry { path, shape, dtype, reduce_dtype, held, segment }
                    })
                    .collect();
                let name = Arc::from(unit.name());
                let gathers = entries.iter().any(|entry| matches!(entry.held, Held::Fragment(_)));
                let returns = unit.level == 0 || options.has_own_policy(unit.unit_type);
                let precision = policy.resolve(common, returns);
                let FoundUnit { path, ty, level, field, checkpointed, within, .. } = unit;
                Unit {
                    name,
                    path,
                    ty,
                    level,
                    field,
                    entries,
                    layout,
                    gathers,
                    precision,
                    checkpointed,
                    within,
                }
            })
            .collect();
        (units, places)
    }

    /// The layout, line by line, as all ranks must have it.
    pub(crate) fn fingerprint(&self, options: &FsdpOptions) -> Vec<String> {
        // Ids are each process's own.
        let options = FsdpOptions { ignored: Vec::new(), ..options.clone() };
        let seed = options.seed.map_or("none".into(), |seed| seed.to_string());
        let mut lines = vec![
            format!("strategy {}", options.strategy),
            format!("seed {seed}"),
            format!("{options:?}"),
        ];
        for unit in &self.units {
            lines.push(format!("unit {} (level {})", unit.name, unit.level));
            for entry in &unit.entries {
                let held = match &entry.held {
                    Held::Fragment(_) => "sharded".to_string(),
                    Held::Whole | Held::Own => "replicated".to_string(),
                    Held::TiedTo(first) => format!("tied to {}", unit.entries[*first].path),
                };
                lines.push(format!("{} {:?} {:?} {held}", entry.path, entry.shape, entry.dtype));
            }
        }
        lines
    }
}

/// The walk that finds everything.
#[derive(Debug, Default)]
struct Inventory {
    wrap: WrapPolicy,
    checkpointing: ActivationCheckpointing,
    /// The types of units found.
    types: Vec<UnitType>,
    /// Parameters to leave alone that have not been found yet.
    ignored: Vec<ParamId>,
    left_alone: Vec<IgnoredParam>,
    /// The item of each parameter found; `None` for one that is left alone.
    order: Vec<Option<usize>>,
    path: Vec<String>,
    key: Vec<String>,
    transposed: Vec<bool>,
    units: Vec<FoundUnit>,
    stack: Vec<usize>,
    items: Vec<Item>,
    /// Full paths of tied places.
    ties: Vec<(String, String)>,
    devices: Vec<Device>,
    error: Option<ShardError>,
}

impl Inventory {
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
    fn current(&self) -> usize {
        *self.stack.last().expect("the outermost unit is on the stack")
    }

    fn fail(&mut self, error: ShardError) {
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
        let entry = Entry { path, shape, dtype, reduce_dtype, held: Held::Own, segment: None };
        self.left_alone.push(IgnoredParam { id, key, entry });
    }

    fn found<const D: usize>(&mut self, below: &[String], param: &Param<Tensor<D>>) {
        let path = self.join(below);
        let key = self.key_of(below);
        let shape = param.lazy_shape().as_slice().to_vec();
        let managed = !self.ignored.contains(&param.id);
        self.order.push(managed.then_some(self.items.len()));
        if !managed {
            self.ignored.retain(|id| *id != param.id);
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
        if !self.devices.contains(&device) {
            self.devices.push(device);
        }
        let unit = self.current();
        // One that is not initialised takes the type it is drawn in to f32.
        let dtype = if param.is_initialized() { param.base().dtype() } else { DType::F32 };
        self.items.push(Item { path, key, id: param.id, shape, dtype, unit, tied_to: None });
    }
}

impl Walk for Inventory {
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
        let wraps = wraps(self.wrap, module);
        let checkpoints = wraps && self.checkpoints::<M>();
        self.open(wraps, M::LAYOUT.ty, Some(UnitType::of_module::<M>()), checkpoints);
        if wraps {
            self.can_be_replayed::<M>(self.current());
        }
        true
    }

    fn field_unit<M: Module>(&mut self, module: &M) -> bool {
        let ty = type_name::<M>().split('<').next().unwrap_or_default();
        let ty = ty.rsplit("::").next().unwrap_or_default();
        self.open(wraps_field(self.wrap, module), ty, None, false);
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
