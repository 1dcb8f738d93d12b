//! The parameter group of a unit: its parameters, where they lie, and what it will need of memory.

pub(crate) mod forecast;
pub(crate) mod memory;
pub(crate) mod plan;
mod unit;
pub(crate) mod wrapping;

pub(crate) use self::unit::{ParamSpec, Placement, Unit, gather_buffer_plan};
