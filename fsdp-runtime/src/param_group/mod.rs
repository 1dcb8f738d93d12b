//! The parameter group of a unit: its parameters, where a rank stores them, and the memory they
//! take.

mod control;
pub(crate) mod memory;
pub(crate) mod mib;
pub(crate) mod plan;
pub(crate) mod probes;
mod rings;
mod tables;
mod unit;
pub(crate) mod wrapping;

pub(crate) use self::control::UnitControl;
pub(crate) use self::rings::{Rings, gather_buffer_plan};
pub(crate) use self::tables::{TableDtypes, is_cast};
pub(crate) use self::unit::{ParamSpec, Placement, Unit, UnitGroup, code_buffers};
