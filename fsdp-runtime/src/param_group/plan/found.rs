//! The results of one traversal of a module: units, parameters, ties and devices.

use burn::module::ParamId;
use burn::tensor::{DType, Device};

use super::super::tables::FoundTable;
use super::super::unit::ParamSpec;
use crate::layout::{Mesh, TensorSplit};
use crate::module::{Split, UnitType};

/// Dtypes that a sharded parameter may be initialised in. Shards are f32 in every case.
pub(crate) const SHARDED: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// The key of a parameter in a pretrained checkpoint of another framework.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    /// Name of the tensor in the checkpoint.
    pub(crate) name: String,
    /// Whether the checkpoint stores the transposed matrix.
    pub(crate) transposed: bool,
}

/// A parameter that sharding leaves unchanged: an ignored parameter or a running statistic.
///
/// Each rank has the whole parameter, and the values may differ between ranks.
#[derive(Clone, Debug)]
pub(crate) struct IgnoredParam {
    /// Burn's id of the parameter.
    pub(crate) id: ParamId,
    /// Key of the parameter in a pretrained checkpoint.
    pub(crate) key: Key,
    /// Path, shape and dtype of the parameter.
    pub(crate) spec: ParamSpec,
}

/// A parameter of the module that FSDP manages.
#[derive(Debug)]
pub(super) struct FoundParam {
    /// Module path of the parameter.
    pub(super) path: String,
    /// Key of the parameter in a pretrained checkpoint.
    pub(super) key: Key,
    /// Burn's id of the parameter.
    pub(super) id: ParamId,
    /// Full shape of the parameter.
    pub(super) shape: Vec<usize>,
    /// How tensor parallel ranks split the parameter's layer, if they do.
    pub(super) layer_split: Option<Split>,
    /// This rank's part, once the mesh is known.
    pub(super) split: Option<TensorSplit>,
    /// Dtype that the parameter is initialised in.
    pub(super) dtype: DType,
    /// Whether the parameter requires no gradient. On a device without autodiff, `false` unless the
    /// options treat frozen parameters differently.
    pub(super) frozen: bool,
    /// Number of the parameter's unit.
    pub(super) unit: usize,
    /// Number of the module in a unit of several fields; 0 in any other unit.
    pub(super) module: usize,
    /// Number of the parameter that owns this weight, if this one is an alias.
    pub(super) tied_to: Option<usize>,
}

impl FoundParam {
    /// Returns whether tensor parallel ranks use the whole parameter with parts of other values. Under sequence
    /// parallel all values outside of split layers are parts. Split layers themselves add up the gradients of their
    /// adapters' whole factors.
    pub(super) fn is_shared(&self, mesh: Mesh) -> bool {
        match self.layer_split {
            Some(Split::Shared) => true,
            Some(_) => mesh.splits_sequence() && self.split.is_none() && !self.is_factor(),
            None => mesh.splits_sequence(),
        }
    }

    /// Returns whether the parameter is a factor of a LoRA adapter.
    fn is_factor(&self) -> bool {
        [".lora.a", ".lora.b"].iter().any(|end| self.path.ends_with(end))
    }

    /// Returns the number of elements of the full parameter.
    pub(super) fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A unit of the module.
#[derive(Debug)]
pub(super) struct FoundUnit {
    /// Module path of the unit; empty for the outermost unit.
    pub(super) path: String,
    /// Name of the unit's type.
    pub(super) ty: &'static str,
    /// Number of units that enclose this one.
    pub(super) level: usize,
    /// Whether a field under `#[fsdp(unit)]` makes the module a unit.
    pub(super) field: bool,
    /// Type of a unit under `#[fsdp_unit]`; `None` for a field unit.
    pub(super) unit_type: Option<UnitType>,
    /// Whether the unit's forward is recomputed in backward.
    pub(super) recomputed: bool,
    /// Number of the enclosing unit whose recomputation includes this unit.
    pub(super) within: Option<usize>,
    /// Number of managed parameters that the traversal finds before the unit.
    pub(super) params_before: usize,
    /// The modules of a unit of several fields.
    pub(super) group: Option<FoundGroup>,
}

/// The modules in the fields of a group, which are one unit.
#[derive(Clone, Copy, Debug)]
pub(super) struct FoundGroup {
    /// Number of the enclosing unit.
    pub(super) enclosing: usize,
    /// Number of modules.
    pub(super) modules: usize,
    /// Number of units that the traversal had found after the last of them.
    pub(super) until: usize,
}

impl FoundGroup {
    /// Returns a group without modules, in the unit `enclosing`.
    pub(super) fn new(enclosing: usize) -> Self {
        Self { enclosing, modules: 0, until: 0 }
    }
}

impl FoundUnit {
    /// Returns the path in backticks, or `(root)` for the outermost unit.
    pub(super) fn name(&self) -> String {
        if self.path.is_empty() { "(root)".to_string() } else { format!("`{}`", self.path) }
    }
}

/// A module that must receive f32 inputs, such as one with running statistics.
#[derive(Debug)]
pub(super) struct F32Module {
    /// Number of the unit that contains the module.
    pub(super) unit: usize,
    /// Path of the module.
    pub(super) path: String,
    /// Name of the module's type.
    pub(super) ty: &'static str,
}

/// A declared tie, with full module paths.
#[derive(Debug)]
pub(super) struct FoundTie {
    /// Path of the place that owns the weight.
    pub(super) first: String,
    /// Path of the place that aliases the weight.
    pub(super) second: String,
    /// Whether the tie holds only for parameters that are clones of one.
    pub(super) if_shared: bool,
}

/// Everything that one traversal of a module finds.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Units, in layout order.
    pub(super) units: Vec<FoundUnit>,
    /// Managed parameters, in the order of the traversal.
    pub(super) params: Vec<FoundParam>,
    /// Index in `params` of each parameter of the traversal; `None` for an ignored parameter.
    pub(super) visited: Vec<Option<usize>>,
    /// Ignored parameters and running statistics, in the order of the traversal.
    pub(super) ignored: Vec<IgnoredParam>,
    /// Declared ties.
    pub(super) ties: Vec<FoundTie>,
    /// All types under `#[fsdp_unit]`, including those that the wrap policy makes no unit of.
    pub(super) types: Vec<UnitType>,
    /// Devices of the managed parameters, each with the path of the first parameter on it.
    pub(super) devices: Vec<(Device, String)>,
    /// Modules that must receive f32 inputs.
    pub(super) f32_modules: Vec<F32Module>,
    /// Float tensors that are neither parameters nor running statistics.
    pub(super) tables: Vec<FoundTable>,
}
