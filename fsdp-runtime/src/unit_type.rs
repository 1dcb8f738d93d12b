//! Units named by type, as wrap lists do.

use std::any::TypeId;

use crate::unit::{FsdpModule, FsdpUnit};

/// A type under `#[fsdp_unit]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitType {
    id: TypeId,
    ty: &'static str,
}

impl UnitType {
    /// The unit `T`.
    pub const fn of<T: FsdpUnit>() -> Self {
        Self::of_module::<T>()
    }

    /// The type of a module that is known to be a unit.
    pub(crate) const fn of_module<T: FsdpModule>() -> Self {
        Self { id: TypeId::of::<T>(), ty: T::LAYOUT.ty }
    }

    /// The type's name, without its path.
    pub const fn name(self) -> &'static str {
        self.ty
    }
}

/// A list of units: `unit_types![BertLayer, BertEmbeddings]` is a `&[UnitType]`. A type that is not
/// a unit does not compile.
///
/// ```
/// use fsdp_runtime::{UnitType, unit_types};
///
/// const NONE: &[UnitType] = unit_types![];
/// assert!(NONE.is_empty());
/// ```
#[macro_export]
macro_rules! unit_types {
    ($($ty:ty),* $(,)?) => {
        const { &[$($crate::UnitType::of::<$ty>()),*] as &[$crate::UnitType] }
    };
}
