//! Lists of unit types, for options that apply to some units only.

use std::any::type_name;
use std::fmt;

use super::contract::{FsdpModule, FsdpUnit};

/// The type of a unit, as an element of the lists that options take.
///
/// [`WrapPolicy::TransformerBased`](crate::options::WrapPolicy::TransformerBased), among others, takes such
/// a list. [`unit_types!`](crate::unit_types) makes a list from types. Two values are equal if
/// their types have the same full path. A value from a configuration, which has only the name of a
/// type, is equal to every type of that name.
#[derive(Clone, Copy)]
pub struct UnitType {
    /// Returns the full path of the type, which is not available in constants. `None` if only the
    /// name is known.
    path: Option<fn() -> &'static str>,
    ty: &'static str,
}

impl PartialEq for UnitType {
    fn eq(&self, other: &Self) -> bool {
        match (self.path, other.path) {
            (Some(path), Some(other)) => path() == other(),
            _ => self.ty == other.ty,
        }
    }
}

impl Eq for UnitType {}

impl fmt::Debug for UnitType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.path.map_or(self.ty, |path| path()))
    }
}

impl UnitType {
    /// Creates the value for the unit `T`. A type without `#[fsdp_unit]` does not compile.
    pub const fn of<T: FsdpUnit>() -> Self {
        Self::of_module::<T>()
    }

    /// Creates the value for a type whose layout is known to be a unit's.
    pub(crate) const fn of_module<T: FsdpModule>() -> Self {
        Self { path: Some(type_name::<T>), ty: T::LAYOUT.ty }
    }

    /// Creates the value for all unit types of a name.
    pub(crate) const fn named(ty: &'static str) -> Self {
        Self { path: None, ty }
    }

    /// Returns the name of the type, without its path.
    pub const fn name(self) -> &'static str {
        self.ty
    }
}

/// Creates a list of unit types: `unit_types![BertLayer, BertEmbeddings]` is a `&[UnitType]`.
///
/// # Errors
///
/// A type that is not a unit does not compile.
///
/// # Example
///
/// ```
/// use burn::module::Module;
/// use burn::nn::Linear;
/// use burn::tensor::Tensor;
/// use fsdp_runtime::options::UnitType;
/// use fsdp_runtime::{fsdp_unit, unit_types};
///
/// #[derive(Module, Debug)]
/// #[fsdp_unit]
/// pub struct Block {
///     up: Linear,
/// }
///
/// #[fsdp_unit]
/// impl Block {
///     pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         self.up.forward(x)
///     }
/// }
///
/// const BLOCKS: &[UnitType] = unit_types![Block];
/// assert_eq!(BLOCKS[0].name(), "Block");
/// assert!(unit_types![].is_empty());
/// ```
#[macro_export]
macro_rules! unit_types {
    ($($ty:ty),* $(,)?) => {
        const { &[$($crate::__private::UnitType::of::<$ty>()),*] as &[$crate::__private::UnitType] }
    };
}
