//! Units named by type, as wrap lists do.

use std::any::type_name;
use std::fmt;

use crate::module::{FsdpModule, FsdpUnit};

/// A type under `#[fsdp_unit]`.
#[derive(Clone, Copy)]
pub struct UnitType {
    /// The type's full path; a function, as the path is not known in constants.
    path: fn() -> &'static str,
    ty: &'static str,
}

impl PartialEq for UnitType {
    fn eq(&self, other: &Self) -> bool {
        (self.path)() == (other.path)()
    }
}

impl Eq for UnitType {}

impl fmt::Debug for UnitType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str((self.path)())
    }
}

impl UnitType {
    /// The unit `T`.
    pub const fn of<T: FsdpUnit>() -> Self {
        Self::of_module::<T>()
    }

    /// The type of a module that is known to be a unit.
    pub(crate) const fn of_module<T: FsdpModule>() -> Self {
        Self { path: type_name::<T>, ty: T::LAYOUT.ty }
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
