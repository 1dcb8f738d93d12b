//! Ranks and meshes, and the flat ranges in which the matrices of a unit lie.

mod flat;
mod hash;
mod mesh;
mod unit;

pub use self::flat::{ALIGNMENT, FlatLayout};
pub(crate) use self::hash::mix;
pub use self::mesh::{Mesh, MeshError, Rank, WorldSize};
#[cfg(test)]
pub(crate) use self::unit::FlatRange;
pub(crate) use self::unit::UnitLayout;
