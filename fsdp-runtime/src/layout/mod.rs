//! Ranks, meshes, and the flat ranges that hold a unit's matrices.

mod context_part;
mod flat;
mod mesh;
mod tensor_split;
mod unit;

pub use self::context_part::ContextPart;
pub use self::flat::{ALIGNMENT, FlatLayout};

pub use self::mesh::{Mesh, MeshError, Rank, WorldSize};

pub(crate) use self::tensor_split::{TensorSplit, parts_of};
pub(crate) use self::unit::{FlatRange, MatrixForm, UnitLayout};
pub use fsdp_kernels::StorageType;
pub(crate) use fsdp_kernels::mix;
