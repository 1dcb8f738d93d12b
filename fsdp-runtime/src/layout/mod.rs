//! Ranks, meshes, and the flat ranges that hold a unit's matrices.

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
