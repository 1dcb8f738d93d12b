//! The dtype of *tables* in a forward: float tensors of a module that are neither parameters nor
//! running statistics.

use burn::tensor::{DType, Device};

use super::fsdp_options::FsdpOptions;
use super::precision::check_dtype;
use super::resolve::leads_to;
use crate::error::ShardError;

/// The options about tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TableRules {
    /// Dtype of tables in all units.
    general: Option<DType>,
    /// Dtype of tables in modules of a type, by the type's name.
    types: Vec<(&'static str, DType)>,
    /// Dtype of tables at and below a module path.
    paths: Vec<(String, DType)>,
}

/// A table, as rules see it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TablePlace<'a> {
    /// Names of the types that contain the table, outermost first, its own type included.
    pub(crate) types: &'a [&'static str],
    /// Module path of the table; for a table in an argument, that of the called unit.
    pub(crate) path: &'a str,
    /// `param_dtype` of the unit.
    pub(crate) param: Option<DType>,
    /// Whether the module computes in the device's default dtype, so that only a rule for its type or
    /// its path casts the table.
    pub(crate) in_device_dtype: bool,
}

impl TableRules {
    /// Returns whether no option is set.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the dtype to which a table is cast, if it is: that of the last path that leads to it, or
    /// else of the innermost type with a rule, or else of all units.
    pub(crate) fn dtype(&self, place: TablePlace<'_>) -> Option<DType> {
        self.by_path(place.path).or_else(|| self.by_type(place.types)).or_else(|| {
            let of_units = self.general.or(place.param);
            of_units.filter(|_| !place.in_device_dtype)
        })
    }

    /// Returns the dtype of the last path that leads to `path`.
    pub(crate) fn by_path(&self, path: &str) -> Option<DType> {
        self.paths.iter().rev().find(|(to, _)| leads_to(to, path)).map(|(_, dtype)| *dtype)
    }

    /// Returns the dtype of the innermost type that has a rule; of several rules, the last.
    fn by_type(&self, types: &[&'static str]) -> Option<DType> {
        let of_type = |ty: &&str| self.types.iter().rev().find(|(of, _)| of == ty);
        types.iter().rev().find_map(of_type).map(|(_, dtype)| *dtype)
    }
}

impl FsdpOptions {
    /// Returns the options about tables.
    pub(crate) fn table_rules(&self) -> TableRules {
        let types = self.buffer_dtype_for.iter();
        let paths = self.buffer_dtype_at.iter();
        TableRules {
            general: self.buffer_dtype.map(DType::from),
            types: types.map(|(ty, dtype)| (ty.name(), DType::from(*dtype))).collect(),
            paths: paths.map(|(path, dtype)| (path.clone(), DType::from(*dtype))).collect(),
        }
    }

    /// Checks that `device` supports the dtypes of tables.
    pub(crate) fn check_buffer_dtypes(&self, device: &Device) -> Result<(), ShardError> {
        let of_types = self.buffer_dtype_for.iter().map(|(_, dtype)| ("buffer_dtype_for", *dtype));
        let of_paths = self.buffer_dtype_at.iter().map(|(_, dtype)| ("buffer_dtype_at", *dtype));
        let general = self.buffer_dtype.map(|dtype| ("buffer_dtype", dtype));
        let mut dtypes = general.into_iter().chain(of_types).chain(of_paths);
        dtypes.try_for_each(|(option, dtype)| check_dtype(option, dtype, device))
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, RotaryEncoding};
    use burn::tensor::FloatDType;

    use super::*;

    /// Returns the dtype of the table at `blocks.1.rope` in a unit with a `param_dtype` of bf16.
    fn dtype(
        options: &FsdpOptions,
        types: &[&'static str],
        in_device_dtype: bool,
    ) -> Option<DType> {
        let param = Some(DType::BF16);
        let place = TablePlace { types, path: "blocks.1.rope", param, in_device_dtype };
        options.table_rules().dtype(place)
    }

    #[test]
    fn the_dtype_is_that_of_the_parameters_unless_a_rule_says_another() {
        let types = ["Llama", "Block", "RotaryEncoding"];
        let default = FsdpOptions::new();
        assert!(default.table_rules().is_empty());
        assert_eq!(dtype(&default, &types, false), Some(DType::BF16));
        let general = default.with_buffer_dtype(FloatDType::F16);
        assert_eq!(dtype(&general, &types, false), Some(DType::F16));
        let of_type = general.with_buffer_dtype_for::<RotaryEncoding>(FloatDType::F32);
        assert_eq!(dtype(&of_type, &types, false), Some(DType::F32));
        assert_eq!(dtype(&of_type, &types[..2], false), Some(DType::F16));
        let at = of_type.with_buffer_dtype_at(["blocks.1"], FloatDType::BF16);
        assert_eq!(dtype(&at, &types, false), Some(DType::BF16));
        let elsewhere = FsdpOptions::new()
            .with_buffer_dtype_for::<Linear>(FloatDType::F32)
            .with_buffer_dtype_at(["blocks.11"], FloatDType::F32);
        assert_eq!(dtype(&elsewhere, &types, false), Some(DType::BF16));
    }

    #[test]
    fn a_table_in_the_dtype_of_the_device_needs_a_rule_of_its_own() {
        let types = ["Llama", "RotaryEncoding"];
        let general = FsdpOptions::new().with_buffer_dtype(FloatDType::F16);
        assert_eq!(dtype(&general, &types, true), None);
        let of_type = general.with_buffer_dtype_for::<RotaryEncoding>(FloatDType::F16);
        assert_eq!(dtype(&of_type, &types, true), Some(DType::F16));
    }
}
