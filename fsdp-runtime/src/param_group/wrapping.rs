//! The units of a sharded model, as a tree to print.

use std::fmt;

use crate::param_group::Unit;

/// One unit as it was wrapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrappedUnit {
    /// Its module path; empty for the outermost.
    pub path: String,
    /// Its type.
    pub ty: &'static str,
    /// How many units enclose it.
    pub level: usize,
    /// Its own parameters, those of units within it not counted.
    pub num_params: usize,
    /// Bytes of parameters that this rank holds of it between steps.
    pub sharded_bytes: usize,
    /// Bytes of the buffer that it is gathered in; 0 when nothing is.
    pub unsharded_bytes: usize,
}

/// The units of a sharded model in layout order: [`Fsdp::wrapping`](crate::Fsdp::wrapping). Prints
/// as a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrapping {
    /// The units, each after the one that encloses it.
    pub units: Vec<WrappedUnit>,
}

impl Wrapping {
    pub(crate) fn new(units: &[Unit]) -> Self {
        let wrapped = |unit: &Unit| {
            let (shards, replicated) = unit.held_bytes();
            WrappedUnit {
                path: unit.path.clone(),
                ty: unit.ty,
                level: unit.level,
                num_params: unit.num_params(),
                sharded_bytes: shards + replicated,
                unsharded_bytes: unit.unsharded_bytes(),
            }
        };
        Self { units: units.iter().map(wrapped).collect() }
    }
}

impl fmt::Display for Wrapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, unit) in self.units.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            let indent = "  ".repeat(unit.level);
            let path = if unit.path.is_empty() { "(root)" } else { &unit.path };
            write!(
                f,
                "{indent}{path}: {} ({} params, {} bytes sharded, {} unsharded)",
                unit.ty, unit.num_params, unit.sharded_bytes, unit.unsharded_bytes
            )?;
        }
        Ok(())
    }
}
