//! The tables of a model that are cast inside of a forward: float tensors that are neither parameters nor
//! running statistics.

use std::collections::BTreeMap;

use burn::tensor::DType;

use super::unit::Unit;
use crate::options::{TablePlace, TableRules};

/// Returns whether tables of this dtype may be cast. Codes and other formats are left alone.
pub(crate) fn is_cast(dtype: DType) -> bool {
    matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
}

/// A table of the model.
#[derive(Clone, Debug)]
pub(crate) struct FoundTable {
    /// Module path of the table.
    pub(crate) path: String,
    /// Number of the unit that contains the table.
    pub(crate) unit: usize,
    /// Names of the types that contain the table, outermost first, its own type included. The name of a
    /// container is empty.
    pub(crate) types: Vec<&'static str>,
    /// Dtype of the table outside of a forward.
    pub(crate) dtype: DType,
    /// Whether its module computes in the device's default dtype.
    pub(crate) in_device_dtype: bool,
}

/// The dtypes of tables inside of a forward.
#[derive(Clone, Debug, Default)]
pub(crate) struct TableDtypes {
    /// Dtype of each table of the model that is cast, by module path.
    pub(crate) cast: BTreeMap<String, DType>,
    /// Module types that hold a table whose dtype an option sets by path, with that dtype.
    pinned: Vec<(&'static str, DType)>,
    rules: TableRules,
}

impl TableDtypes {
    /// Applies the options to the tables of a model.
    pub(crate) fn new(tables: Vec<FoundTable>, units: &[Unit], rules: TableRules) -> Self {
        let (mut cast, mut pinned) = (BTreeMap::new(), Vec::new());
        for FoundTable { path, unit, types, dtype, in_device_dtype } in tables {
            let param = units[unit].precision.params;
            let place = TablePlace { types: &types, path: &path, param, in_device_dtype };
            let found = rules.dtype(place);
            pinned
                .extend(rules.by_path(&path).and_then(|dtype| Some((module_type(&types)?, dtype))));
            if let Some(found) = found.filter(|found| *found != dtype) {
                cast.insert(path, found);
            }
        }
        Self { cast, pinned, rules }
    }

    /// Returns whether a table in an argument of `unit` may have to be cast.
    pub(crate) fn may_cast_arguments(&self, unit: &Unit) -> bool {
        unit.precision.params.is_some() || !self.rules.is_empty()
    }

    /// Returns the dtype to which a table of dtype `dtype` in an argument of `unit` is cast, if it is.
    /// `types` are the names of the types that contain it, outermost first.
    ///
    /// The argument may be a module of the model, whose path is not known here. It keeps a dtype that an
    /// option sets by path for a module of its type.
    pub(crate) fn of_argument(
        &self,
        unit: &Unit,
        types: &[&'static str],
        (dtype, in_device_dtype): (DType, bool),
    ) -> Option<DType> {
        if module_type(types).is_some_and(|ty| self.pinned.contains(&(ty, dtype))) {
            return None;
        }
        let types = [&[unit.ty], types].concat();
        let param = unit.precision.params;
        let place = TablePlace { types: &types, path: &unit.path, param, in_device_dtype };
        self.rules.dtype(place).filter(|found| *found != dtype)
    }
}

/// Returns the innermost type that is neither that of the tensor itself nor a container.
fn module_type(types: &[&'static str]) -> Option<&'static str> {
    types.iter().rev().copied().find(|ty| !ty.is_empty() && *ty != "Tensor")
}
