//! The `Display` of a sharded model: a tree of modules, with the units marked.

use std::collections::HashMap;
use std::fmt;

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::model::Fsdp;
use crate::layout::StorageType;
use crate::module::{Child, FsdpModule, Kind, ModulePath, ParamVisitor};
use crate::param_group::{ParamSpec, Placement, Unit};

/// Prints the modules as a tree, one line each.
///
/// A line has the field's name, and the type of a module or the shape and placement of a parameter.
/// The line of a unit also has the number of the unit's parameters, without those of nested units,
/// and their bytes on this rank and when gathered.
///
/// ```text
/// Net: unit, 16 parameters, 64 B on this rank
///   blocks: Vec
///     0: Block: unit, 4160 parameters, 8.4 KiB on this rank, 16.2 KiB gathered
///       up: Linear
///         weight: [64, 64], sharded
///         bias: [64], replicated
/// ```
impl<M: FsdpModule> fmt::Display for Fsdp<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut tree = Tree::new(self.schedule.units());
        tree.line(M::LAYOUT.ty.to_string());
        self.module.visit_params(&mut tree);
        f.write_str(&tree.lines.join("\n"))
    }
}

/// The visitor that writes the lines of the tree.
struct Tree<'a> {
    units: HashMap<&'a str, &'a Unit>,
    params: HashMap<&'a str, &'a ParamSpec>,
    path: ModulePath,
    lines: Vec<String>,
}

impl<'a> Tree<'a> {
    fn new(units: &'a [Unit]) -> Self {
        Self {
            units: units.iter().map(|unit| (unit.path.as_str(), unit)).collect(),
            params: units
                .iter()
                .flat_map(|unit| &unit.params)
                .map(|param| (param.path.as_str(), param))
                .collect(),
            path: ModulePath::default(),
            lines: Vec::new(),
        }
    }

    /// Returns the last segment of the present path.
    fn name(&self) -> &str {
        self.path.segments().last().map_or("", String::as_str)
    }

    /// Adds a line for the present path, with the numbers of the unit if the path is that of a
    /// unit.
    fn line(&mut self, text: String) {
        let unit = self.units.get(self.path.join(&[]).as_str());
        let mark = unit.map(|unit| unit_mark(unit)).unwrap_or_default();
        self.lines.push(format!("{}{text}{mark}", "  ".repeat(self.path.segments().len())));
    }
}

/// Returns the part of a line that marks a unit.
fn unit_mark(unit: &Unit) -> String {
    let (shards, replicated) = unit.stored_bytes();
    let held = bytes(shards + replicated);
    let gathered = match unit.unsharded_bytes() {
        0 => String::new(),
        gathered => format!(", {} gathered", bytes(gathered)),
    };
    format!(": unit, {} parameters, {held} on this rank{gathered}", unit.num_params())
}

/// Prints a number of bytes in the largest binary unit that is not larger than the number.
fn bytes(bytes: usize) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let (mut value, mut unit) = (bytes as f64 / 1024.0, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    format!("{value:.1} {}", UNITS[unit])
}

impl ParamVisitor for Tree<'_> {
    fn enter(&mut self, child: &'static Child, index: Option<usize>) {
        self.path.enter(child, index);
        let node = child.node.without_option();
        // `param` adds the line of a parameter. Values without parameters have no line.
        if !matches!(node.kind, Kind::Param { .. } | Kind::Fixed | Kind::Constant) {
            self.line(format!("{}: {}", self.name(), node.ty));
        }
    }

    fn exit(&mut self) {
        self.path.exit();
    }

    fn unit<M: FsdpModule>(&mut self, _: &M) -> bool {
        true
    }

    fn field_unit<M: Module>(&mut self, _: &M) -> bool {
        true
    }

    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(&[]);
        let name = self.name();
        let text = match self.params.get(path.as_str()) {
            Some(spec) => {
                let placement = match spec.placement {
                    Placement::Shard(_) => "sharded",
                    Placement::Replicated => "replicated",
                    Placement::PerRank => "each rank's own",
                    Placement::TiedTo(_) => "tied",
                };
                let storage = match spec.storage {
                    StorageType::F32 => String::new(),
                    storage => format!(", {storage}"),
                };
                format!("{name}: {:?}, {placement}{storage}", spec.shape)
            }
            None => format!("{name}: {:?}, each rank's own", param.lazy_shape().as_slice()),
        };
        self.lines.push(format!("{}{text}", "  ".repeat(self.path.segments().len())));
    }

    fn leaf_param<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D>>) {
        path.iter().for_each(|segment| self.path.push(segment));
        self.param(param);
        path.iter().for_each(|_| self.path.exit());
    }
}
