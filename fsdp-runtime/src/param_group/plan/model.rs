//! The plan of a model: traversal, checks, layout and fingerprint.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{DType, Device};
use fsdp_kernels::computes;

use super::super::tables::{FoundTable, TableDtypes};
use super::super::unit::{Placement, Unit};
use super::found::{F32Module, Found, FoundParam, FoundUnit, IgnoredParam, Key};
use super::inventory::Inventory;
use super::prefetch_lists::{add_prefetch_lists, unknown_unit};
use super::ties::{check_clones, resolve_ties};
use super::unit_builder::UnitBuilder;
use super::unknown_types::unknown_type;
use crate::backend::DeviceKind;
use crate::error::ShardError;
use crate::layout::{Mesh, TensorSplit};
use crate::module::{FsdpModule, ParamIndex, Split};
use crate::options::{ActivationCheckpointing, FsdpOptions, computed, leads_to};

/// The units and parameters of a model, with the part of each parameter that one rank stores.
#[derive(Debug)]
pub(crate) struct ModelPlan {
    /// Units, in layout order.
    pub(crate) units: Vec<Unit>,
    /// Unit and position of each parameter, in the order of a traversal; `None` for an ignored one.
    pub(crate) indices: Vec<Option<ParamIndex>>,
    /// Pretrained key of each managed parameter.
    pub(crate) keys: BTreeMap<ParamIndex, Key>,
    /// Ignored parameters and running statistics, in the order of a traversal.
    pub(crate) ignored: Vec<IgnoredParam>,
    /// Device of all managed parameters of the unsharded model.
    pub(crate) device: Device,
    /// Dtypes of tables inside of a forward.
    pub(crate) tables: Arc<TableDtypes>,
}

impl ModelPlan {
    /// Plans the sharding of `module` for the rank of `mesh`.
    ///
    /// # Errors
    ///
    /// Returns the first reason not to shard the module.
    pub(crate) fn new<M: FsdpModule>(
        module: &M,
        mesh: Mesh,
        options: &FsdpOptions,
    ) -> Result<Self, ShardError> {
        let mut found = Inventory::collect(module, options)?;
        if let Some(error) = unknown_type(&found, &M::LAYOUT, options) {
            return Err(error);
        }
        check_ignored(&found, options)?;
        check_storage_paths(&found, options)?;
        if found.params.is_empty() {
            return Err(ShardError::EmptyModel { model: M::LAYOUT.ty });
        }
        resolve_ties(&mut found.params, &found.ties, &found.ignored)?;
        check_clones(&found.params)?;
        split_params(&mut found.params, mesh)?;
        let device = one_device(&found.devices)?;
        let Found { units, params, visited, ignored, f32_modules, tables, .. } = found;
        let types: Vec<_> = units.iter().map(|unit| unit.unit_type).collect();
        let (mut units, indices) =
            lay_out(&params, units, (mesh, DeviceKind::of(&device)), options)?;
        check_unit_paths(&units, options)?;
        add_prefetch_lists(&mut units, &types, options)?;
        check_f32_modules(f32_modules, &units)?;
        check_table_paths(&tables, &units, options)?;
        let tables = Arc::new(TableDtypes::new(tables, &units, options.table_rules()));
        let keys =
            params.into_iter().zip(&indices).map(|(param, index)| (*index, param.key)).collect();
        let indices = visited.into_iter().map(|param| param.map(|param| indices[param])).collect();
        Ok(Self { units, indices, keys, ignored, device, tables })
    }

    /// Logs a warning for field units that [`ActivationCheckpointing::All`] does not recompute.
    pub(crate) fn warn_of_left_out(&self, options: &FsdpOptions) {
        if options.activation_checkpointing != ActivationCheckpointing::All {
            return;
        }
        let fields = self.units.iter().filter(|unit| unit.field && unit.within.is_none());
        let fields: Vec<&str> = fields.map(|unit| &*unit.name).collect();
        if !fields.is_empty() {
            tracing::warn!(
                target: "fsdp",
                "{} is not recomputed: activation checkpointing leaves out units in fields under \
                 `#[fsdp(unit)]`; put `#[fsdp_unit]` on the type of the field to include it",
                fields.join(", "),
            );
        }
    }

    /// Checks that `device` supports the dtypes in which parameters are gathered.
    pub(crate) fn check_dtypes(&self, device: &Device) -> Result<(), ShardError> {
        for entry in self.units.iter().flat_map(|unit| &unit.params) {
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

    /// Returns a description of the options, the mesh and the layout, which all ranks compare line
    /// by line.
    pub(crate) fn fingerprint(&self, options: &FsdpOptions, mesh: Mesh) -> Vec<String> {
        let mut lines = options.fingerprint_lines();
        lines.push(format!("shard groups of {} ranks", mesh.shard_size()));
        lines.push(format!("{} tensor parallel ranks", mesh.tensor_size()));
        for unit in &self.units {
            lines.push(format!("unit {} (level {})", unit.name, unit.level));
            for entry in &unit.params {
                let placement = match &entry.placement {
                    Placement::Shard(_) => "sharded".to_string(),
                    Placement::Replicated | Placement::PerRank => "replicated".to_string(),
                    Placement::TiedTo(first) => format!("tied to {}", unit.params[*first].path),
                };
                let (path, shape, dtype) = (&entry.path, &entry.shape, entry.dtype);
                let storage = entry.storage;
                lines.push(format!("{path} {shape:?} {dtype:?} {placement}, stored in {storage}"));
            }
        }
        lines
    }
}

/// Gives each parameter of a split layer the part of this rank.
fn split_params(params: &mut [FoundParam], mesh: Mesh) -> Result<(), ShardError> {
    let dims: Vec<_> = params.iter().map(split_dim).collect();
    split_along(params, &dims, mesh)
}

/// Gives each parameter the part of this rank along a dimension, if it is split.
pub(super) fn split_along(
    params: &mut [FoundParam],
    dims: &[Option<usize>],
    mesh: Mesh,
) -> Result<(), ShardError> {
    let parts = mesh.tensor_size().size();
    if parts == 1 {
        return Ok(());
    }
    if dims.iter().all(Option::is_none) {
        return Err(ShardError::NothingToSplit { ranks: mesh.tensor_size() });
    }
    for (param, dim) in params.iter_mut().zip(dims) {
        let &Some(dim) = dim else { continue };
        let size = param.shape[dim];
        if !size.is_multiple_of(parts) {
            let (path, ranks) = (param.path.clone(), mesh.tensor_size());
            return Err(ShardError::UnevenSplit { path, dim, size, ranks });
        }
        let part = mesh.tensor_rank().index();
        let gathers = param.layer_split == Some(Split::Column { gather: true });
        let split = TensorSplit { dim, part, parts, gathers };
        param.shape = split.local_shape(&param.shape);
        param.split = Some(split);
    }
    Ok(())
}

/// Returns the dimension along which a parameter of a split layer is split; `None` for one that is whole on
/// each rank: the bias of a sum, and the factor of an adapter on the side that is not split.
fn split_dim(param: &FoundParam) -> Option<usize> {
    let is = |name: &str| param.path.strip_suffix(name).is_some_and(|start| start.ends_with('.'));
    match param.layer_split? {
        Split::Column { .. } if is("lora.a") => None,
        Split::Column { .. } if is("bias") => Some(0),
        Split::Column { .. } => Some(1),
        Split::Row if is("bias") || is("lora.b") => None,
        Split::Row | Split::Vocab => Some(0),
        Split::Shared => None,
    }
}

/// Checks that every id under `ignored_params` is that of a parameter of the model.
fn check_ignored(found: &Found, options: &FsdpOptions) -> Result<(), ShardError> {
    let is_unknown = |id: &_| found.ignored.iter().all(|param| param.id != *id);
    match options.ignored_params.iter().find(|id| is_unknown(id)) {
        Some(id) => Err(ShardError::InvalidOption {
            option: "ignored_params",
            value: id.to_string(),
            expected: "use the ids of parameters of this model".into(),
        }),
        None => Ok(()),
    }
}

/// Checks that every path of a storage policy leads to a parameter of the model.
fn check_storage_paths(found: &Found, options: &FsdpOptions) -> Result<(), ShardError> {
    let is_unknown = |path: &str| found.params.iter().all(|param| !leads_to(path, &param.path));
    match options.storage_at.iter().find(|(path, _)| is_unknown(path)) {
        Some((path, _)) => Err(ShardError::InvalidOption {
            option: "storage_at",
            value: path.clone(),
            expected: "use the module paths of parameters of this model, or of what contains them"
                .into(),
        }),
        None => Ok(()),
    }
}

/// Checks that every path of an option for units leads to a unit of the model.
fn check_unit_paths(units: &[Unit], options: &FsdpOptions) -> Result<(), ShardError> {
    let reshard = options.reshard_after_forward_at.iter().map(|(path, _)| path);
    let precision = options.mixed_precision_at.iter().map(|(path, _)| path);
    let paths = reshard.map(|path| ("reshard_after_forward_at", path));
    let paths = paths.chain(precision.map(|path| ("mixed_precision_at", path)));
    for (option, path) in paths {
        if units.iter().all(|unit| !leads_to(path, &unit.path)) {
            return Err(unknown_unit(option, path, units));
        }
    }
    Ok(())
}

/// Checks that every path of `buffer_dtype_at` leads to a tensor that it may cast, or to a unit, whose
/// arguments may hold such tensors.
fn check_table_paths(
    tables: &[FoundTable],
    units: &[Unit],
    options: &FsdpOptions,
) -> Result<(), ShardError> {
    let is_known = |path: &str| {
        tables.iter().any(|table| leads_to(path, &table.path))
            || units.iter().any(|unit| leads_to(path, &unit.path))
    };
    match options.buffer_dtype_at.iter().find(|(path, _)| !is_known(path)) {
        Some((path, _)) => {
            let found: Vec<String> =
                tables.iter().map(|table| format!("`{}`", table.path)).collect();
            let value = format!("`{path}`");
            let expected = format!(
                "use the module path of a float tensor that is no parameter ({}), or of a unit",
                if found.is_empty() { "there is none".to_string() } else { found.join(", ") }
            );
            Err(ShardError::InvalidOption { option: "buffer_dtype_at", value, expected })
        }
        None => Ok(()),
    }
}

/// Returns the device of all parameters, which must be one.
fn one_device(devices: &[(Device, String)]) -> Result<Device, ShardError> {
    match devices {
        [(device, _)] => Ok(device.clone()),
        devices => {
            let devices = devices.iter().map(|(device, path)| format!("`{path}` on {device:?}"));
            let devices = devices.collect::<Vec<_>>().join(", ");
            Err(ShardError::SeveralDevices { devices })
        }
    }
}

/// Checks that mixed precision does not cast the inputs of modules that must receive f32.
fn check_f32_modules(modules: Vec<F32Module>, units: &[Unit]) -> Result<(), ShardError> {
    for F32Module { unit, path, ty } in modules {
        let Unit { name, precision, .. } = &units[unit];
        if let Some(dtype) = precision.input.filter(|dtype| *dtype != DType::F32) {
            let unit = name.to_string();
            return Err(ShardError::FullPrecision { path, ty, unit, dtype });
        }
    }
    Ok(())
}

/// Lays out all units. Returns them with the position of each parameter.
pub(super) fn lay_out(
    params: &[FoundParam],
    units: Vec<FoundUnit>,
    (mesh, kind): (Mesh, DeviceKind),
    options: &FsdpOptions,
) -> Result<(Vec<Unit>, Vec<ParamIndex>), ShardError> {
    // Parameters of one unit need not be adjacent: nested units come between them.
    let mut counts = vec![0; units.len()];
    let next_index = |param: &FoundParam| {
        let entry = counts[param.unit];
        counts[param.unit] += 1;
        ParamIndex { unit: param.unit, param: entry }
    };
    let indices: Vec<ParamIndex> = params.iter().map(next_index).collect();
    let lay_out_unit = |(number, unit): (usize, FoundUnit)| {
        let own = params.iter().filter(|param| param.unit == number).collect();
        UnitBuilder::new(unit, own, &indices, options).build(mesh, kind)
    };
    let before: Vec<usize> = units.iter().map(|unit| unit.params_before).collect();
    let units = units.into_iter().enumerate().map(lay_out_unit);
    let mut units = units.collect::<Result<Vec<Unit>, _>>()?;
    let is_trained = |index: &ParamIndex| units[index.unit].params[index.param].is_trained;
    let first_trained = indices.iter().position(is_trained).unwrap_or(indices.len());
    for (unit, before) in units.iter_mut().zip(before) {
        unit.takes_model_input = before <= first_trained;
    }
    Ok((units, indices))
}
