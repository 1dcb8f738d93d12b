//! The tree of a sharded model's units, for printing.

use std::fmt;

use super::unit::Unit;

/// A unit of a sharded model, as [`Wrapping`] lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WrappedUnit {
    /// Module path of the unit; empty for the outermost unit.
    pub path: String,
    /// Name of the unit's type.
    pub ty: &'static str,
    /// Number of units that enclose this one; 0 for the outermost unit.
    pub level: usize,
    /// Number of elements of the unit's parameters, without those of nested units.
    pub num_params: usize,
    /// Bytes of the unit's parameters that this rank stores between steps.
    pub sharded_bytes: usize,
    /// Bytes of the unit's gather buffers; 0 if the unit has no sharded parameter.
    pub unsharded_bytes: usize,
}

/// The units of a sharded model, as [`Stats::wrapping`](crate::model::Stats::wrapping) returns them.
///
/// `Display` prints them as a tree, one unit per line.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Wrapping {
    /// Units in layout order, each after the unit that encloses it.
    pub units: Vec<WrappedUnit>,
}

impl Wrapping {
    pub(crate) fn new(units: &[Unit]) -> Self {
        let wrapped = |unit: &Unit| {
            let (shards, replicated) = unit.stored_bytes();
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
