//! Ranks, meshes, and the flat ranges that hold a unit's matrices.

mod flat;
mod hash;
mod mesh;
mod storage_type;
mod unit;

pub use self::flat::{ALIGNMENT, FlatLayout};
pub(crate) use self::hash::mix;
pub use self::mesh::{Mesh, MeshError, Rank, WorldSize};
pub use self::storage_type::StorageType;
pub(crate) use self::unit::{FlatRange, MatrixForm, UnitLayout};
