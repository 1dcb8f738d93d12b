//! Units named by type, as wrap lists do.

use crate::unit::FsdpUnit;

/// A type under `#[fsdp_unit]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitType {
    ty: &'static str,
}

impl UnitType {
    /// The unit `T`.
    pub const fn of<T: FsdpUnit>() -> Self {
        Self { ty: T::LAYOUT.ty }
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
