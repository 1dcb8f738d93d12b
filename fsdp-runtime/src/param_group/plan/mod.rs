//! What a model holds: its units and parameters with their paths and keys, found by one walk over
//! the module, and every reason not to shard it.

mod checkpointed;
mod inventory;
mod named;
mod ties;
mod wraps;

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::ParamId;
use burn::tensor::{DType, Device};

use self::inventory::{FoundUnit, Inventory, Item};
use self::ties::{shared, tie};
use crate::backend::kernels::computes;
use crate::error::ShardError;
use crate::layout::Mesh;
use crate::layout::UnitLayout;
use crate::module::FsdpModule;
use crate::module::ParamIndex;
use crate::options::computed;
use crate::options::{ActivationCheckpointing, FsdpOptions};
use crate::param_group::{ParamSpec, Placement, Unit};

/// A parameter's name in a checkpoint from elsewhere, and whether it lies transposed there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) name: String,
    pub(crate) transposed: bool,
}

/// The types that parameters may have; whatever it is, they rest in f32.
pub(crate) const SHARDED: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// What is left alone: whole, and each rank's own. A parameter that is ignored, or a running statistic.
#[derive(Clone, Debug)]
pub(crate) struct IgnoredParam {
    pub(crate) id: ParamId,
    pub(crate) key: Key,
    pub(crate) entry: ParamSpec,
}

/// A model's units and parameters.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The units, in layout order, without slots.
    pub(crate) units: Vec<Unit>,
    /// The parameters, in the order of the walk; `None` for one that is ignored.
    pub(crate) places: Vec<Option<ParamIndex>>,
    /// The checkpoint key of each place.
    pub(crate) keys: BTreeMap<ParamIndex, Key>,
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
        let inventory = Inventory::of(module, options)?;
        let Inventory {
            mut items, order, units, ties, devices, left_alone, full_precision, ..
        } = inventory;
        let found = |id: &&ParamId| left_alone.iter().any(|param| param.id == **id);
        if let Some(id) = options.ignored.iter().find(|id| !found(id)) {
            return Err(ShardError::InvalidOption {
                option: "ignored_params",
                value: id.to_string(),
                expected: "use the ids of parameters of this model".into(),
            });
        }
        if items.is_empty() {
            return Err(ShardError::EmptyModel { model: M::LAYOUT.ty });
        }
        tie(&mut items, &ties, &left_alone)?;
        shared(&items)?;
        let device = match devices.as_slice() {
            [(device, _)] => device.clone(),
            devices => {
                let first = devices.iter().map(|(device, path)| format!("`{path}` on {device:?}"));
                let devices = first.collect::<Vec<_>>().join(", ");
                return Err(ShardError::SeveralDevices { devices });
            }
        };
        let (units, places) = Self::lay_out(&items, units, mesh, options);
        for (unit, path, ty) in full_precision {
            let Unit { name, precision, .. } = &units[unit];
            if let Some(dtype) = precision.input.filter(|dtype| *dtype != DType::F32) {
                let unit = name.to_string();
                return Err(ShardError::FullPrecision { path, ty, unit, dtype });
            }
        }
        let keys = items.into_iter().zip(&places).map(|(item, place)| (*place, item.key)).collect();
        let places = order.into_iter().map(|item| item.map(|item| places[item])).collect();
        Ok(Self { units, places, keys, ignored: left_alone, device })
    }

    /// Warns of units that `ActivationCheckpointing::All` leaves out, the outermost aside.
    pub(crate) fn warn_of_left_out(&self, options: &FsdpOptions) {
        if options.activation_checkpointing != ActivationCheckpointing::All {
            return;
        }
        let fields = self.units.iter().filter(|unit| unit.field && unit.within.is_none());
        let fields: Vec<&str> = fields.map(|unit| &*unit.name).collect();
        if !fields.is_empty() {
            tracing::warn!(
                target: "fsdp",
                "{} is not checkpointed: the forward of a unit in a field under `#[fsdp(unit)]` is not \
                 run again; put `#[fsdp_unit]` on its type",
                fields.join(", "),
            );
        }
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
    ) -> (Vec<Unit>, Vec<ParamIndex>) {
        // Each item's position within its unit, in the order of the walk.
        let mut counts = vec![0; found.len()];
        let places: Vec<ParamIndex> = items
            .iter()
            .map(|item| {
                let entry = counts[item.unit];
                counts[item.unit] += 1;
                ParamIndex { unit: item.unit, entry }
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
                    // Nothing is laid out: the one type of its small matrices, or else vectors.
                    [] => {
                        let of_rank = |least| own.iter().filter(move |i| i.shape.len() >= least);
                        let all = if of_rank(2).next().is_some() { of_rank(2) } else { of_rank(0) };
                        let mut dtypes = all.map(|item| dtype_of(item));
                        let first = dtypes.next().unwrap_or(policy.param().unwrap_or(DType::F32));
                        dtypes.all(|dtype| dtype == first).then_some(first)
                    }
                    _ => layout.dtype(),
                };
                let entries: Vec<ParamSpec> = own
                    .iter()
                    .map(|item| {
                        let segment = if is_matrix(&item) { segments.next() } else { None };
                        let held = match (item.tied_to, segment, options.strategy) {
                            (Some(first), ..) => Placement::TiedTo(places[first].entry),
                            (None, Some(segment), strategy) if strategy.shards() => {
                                Placement::Shard(layout.shard_of(segment, mesh.shard_rank()))
                            }
                            _ => Placement::Replicated,
                        };
                        let (path, shape) = (item.path.clone(), item.shape.clone());
                        let dtype = dtype_of(item);
                        let reduce_dtype = policy.reduce(common, dtype);
                        ParamSpec { path, shape, dtype, reduce_dtype, held, segment }
                    })
                    .collect();
                let name = Arc::from(unit.name());
                let gathers = entries.iter().any(|entry| matches!(entry.held, Placement::Shard(_)));
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
    pub(crate) fn fingerprint(&self, options: &FsdpOptions, mesh: Mesh) -> Vec<String> {
        let mut lines = options.fingerprint_lines();
        lines.push(format!("groups of {} that share parameters", mesh.shard_size()));
        for unit in &self.units {
            lines.push(format!("unit {} (level {})", unit.name, unit.level));
            for entry in &unit.entries {
                let held = match &entry.held {
                    Placement::Shard(_) => "sharded".to_string(),
                    Placement::Replicated | Placement::PerRank => "replicated".to_string(),
                    Placement::TiedTo(first) => format!("tied to {}", unit.entries[*first].path),
                };
                lines.push(format!("{} {:?} {:?} {held}", entry.path, entry.shape, entry.dtype));
            }
        }
        lines
    }
}
