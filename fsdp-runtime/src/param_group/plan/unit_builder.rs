//! The layout of one unit's parameters.

use std::sync::Arc;

use burn::tensor::DType;

use super::super::control::UnitControl;
use super::super::unit::{ParamSpec, Placement, Unit, UnitGroup};
use super::found::{FoundGroup, FoundParam, FoundUnit};
use crate::backend::DeviceKind;
use crate::error::ShardError;
use crate::layout::{MatrixForm, Mesh, StorageType, UnitLayout, WorldSize};
use crate::module::ParamIndex;
use crate::options::{FsdpOptions, MixedPrecisionPolicy, OffloadPolicy};

/// Makes the [`Unit`] of one unit that the traversal found.
#[derive(Debug)]
pub(super) struct UnitBuilder<'a> {
    unit: FoundUnit,
    /// Parameters of the unit, in layout order.
    params: Vec<&'a FoundParam>,
    /// Position of every parameter of the model, in the order of the traversal.
    indices: &'a [ParamIndex],
    options: &'a FsdpOptions,
    /// Mixed precision of the unit.
    policy: MixedPrecisionPolicy,
}

impl<'a> UnitBuilder<'a> {
    pub(super) fn new(
        unit: FoundUnit,
        params: Vec<&'a FoundParam>,
        indices: &'a [ParamIndex],
        options: &'a FsdpOptions,
    ) -> Self {
        let policy = options.policy(unit.unit_type, &unit.path);
        Self { unit, params, indices, options, policy }
    }

    /// Returns the unit as the rank of `mesh` stores it. `kind` is that of the device that computes.
    pub(super) fn build(self, mesh: Mesh, kind: DeviceKind) -> Result<Unit, ShardError> {
        let layout = self.layout(mesh);
        let common = self.common_dtype(&layout);
        let entries = self.param_specs(&layout, common, mesh);
        let gathers = gathers(&entries, mesh, self.options, kind);
        let (ty, path) = (self.unit.unit_type, &*self.unit.path);
        let casts_outputs = self.unit.level == 0 || self.options.has_own_policy(ty, path);
        let control = UnitControl {
            reshard_after_backward: self.options.reshard_after_backward,
            is_group: self.unit.group.is_some(),
            ..UnitControl::new(self.options.reshard(ty, path, mesh)?)
        };
        let group = self.unit.group.map(|FoundGroup { enclosing, modules, until }| {
            let module_of = self.params.iter().map(|param| param.module).collect();
            UnitGroup { enclosing, modules, until, module_of }
        });
        Ok(Unit {
            name: Arc::from(self.unit.name()),
            path: self.unit.path,
            ty: self.unit.ty,
            level: self.unit.level,
            field: self.unit.field,
            params: entries,
            layout,
            gathers,
            precision: self.policy.resolve(common, casts_outputs),
            recomputed: self.unit.recomputed,
            within: self.unit.within,
            takes_model_input: false,
            group,
            control,
        })
    }

    /// Lays out the matrices of the unit in flat ranges.
    fn layout(&self, mesh: Mesh) -> UnitLayout {
        let matrices = self.params.iter().filter(|param| self.is_matrix(param));
        let matrix = |param: &&FoundParam| {
            let (dtype, storage, codes) =
                (self.dtype(param), self.storage(param), self.codes(param));
            let record = self.gradient_codes(param).map_or(1, StorageType::record_len);
            (MatrixForm { dtype, storage, codes, record }, param.numel())
        };
        UnitLayout::stored_as(matrices.map(matrix), mesh.shard_size())
    }

    /// Returns whether a parameter has a place in a flat range: not tied, of rank 2 or more, and
    /// not below the size under which parameters stay replicated.
    fn is_matrix(&self, param: &FoundParam) -> bool {
        param.tied_to.is_none()
            && param.shape.len() >= 2
            && param.numel() >= self.options.persist_below.max(1)
    }

    /// Returns the dtype in which a parameter is gathered and computed with.
    fn dtype(&self, param: &FoundParam) -> DType {
        self.policy.param().unwrap_or(param.dtype)
    }

    /// Returns the form in which a parameter is stored. Codes are for matrices in the layout.
    fn storage(&self, param: &FoundParam) -> StorageType {
        let policy = self.options.storage_of(self.unit.unit_type, &param.path);
        let storage = policy.of(param.frozen);
        let applies = param.tied_to.is_none() && (!storage.is_coded() || self.is_matrix(param));
        if applies { storage } else { StorageType::F32 }
    }

    /// Returns the codes that a trained matrix is sent in, if it is not sent as it is stored.
    fn codes(&self, param: &FoundParam) -> Option<StorageType> {
        self.options.weight_codes().filter(|_| !param.frozen && self.is_matrix(param))
    }

    /// Returns the codes that the gradient of a matrix is sent in, if there are any.
    fn gradient_codes(&self, param: &FoundParam) -> Option<StorageType> {
        let can_be_trained = !param.frozen || self.storage(param) == StorageType::F32;
        self.options.gradient_codes().filter(|_| can_be_trained && self.is_matrix(param))
    }

    /// Returns the dtype that the unit computes in, or `None` if there are several.
    ///
    /// It is the dtype of the matrices in the layout. For a unit without a layout it is the dtype
    /// of its small matrices, or of its vectors if it has no matrix.
    fn common_dtype(&self, layout: &UnitLayout) -> Option<DType> {
        if !layout.ranges().is_empty() {
            return layout.dtype();
        }
        let has_matrices = self.params.iter().any(|param| param.shape.len() >= 2);
        let least_rank = if has_matrices { 2 } else { 0 };
        let params = self.params.iter().filter(|param| param.shape.len() >= least_rank);
        let mut dtypes = params.map(|param| self.dtype(param));
        let first = dtypes.next().or(self.policy.param()).unwrap_or(DType::F32);
        dtypes.all(|dtype| dtype == first).then_some(first)
    }

    /// Returns the parameters of the unit, each with its placement.
    fn param_specs(
        &self,
        layout: &UnitLayout,
        common: Option<DType>,
        mesh: Mesh,
    ) -> Vec<ParamSpec> {
        // The layout numbers the matrices in the order of the parameters.
        let mut segments = 0..;
        let spec = |param: &&FoundParam| {
            let segment = if self.is_matrix(param) { segments.next() } else { None };
            let placement = match (param.tied_to, segment) {
                (Some(owner), _) => Placement::TiedTo(self.indices[owner].param),
                (None, Some(segment)) if self.options.strategy.shards() => {
                    Placement::Shard(layout.shard_of(segment, mesh.shard_rank()))
                }
                _ => Placement::Replicated,
            };
            let (path, shape) = (param.path.clone(), param.shape.clone());
            let dtype = self.dtype(param);
            let reduce_dtype = self.policy.reduce(common, dtype);
            let is_sharded = matches!(placement, Placement::Shard(_));
            ParamSpec {
                path,
                split: param.split,
                is_shared: mesh.tensor_size() != WorldSize::ONE && param.is_shared(mesh),
                shape,
                dtype,
                reduce_dtype,
                placement,
                storage: self.storage(param),
                is_trained: !param.frozen,
                codes: self.codes(param),
                gradient_codes: self.gradient_codes(param).filter(|_| is_sharded),
                segment,
            }
        };
        self.params.iter().map(spec).collect()
    }
}

/// Returns whether the parameters of a unit are gathered. Those of a unit that computes with its shards where
/// they are need not be: each one is a whole parameter, in the dtype and on the device that computes.
///
/// On Flex a unit is gathered all the same if debug assertions are on: a parameter that is read outside of
/// its unit's forward and backward then shows on one rank as well.
pub(crate) fn gathers(
    entries: &[ParamSpec],
    mesh: Mesh,
    options: &FsdpOptions,
    kind: DeviceKind,
) -> bool {
    let computed = |entry: &ParamSpec| {
        let is_f32 = entry.dtype == DType::F32 && entry.sent() == StorageType::F32;
        !entry.is_sharded() || is_f32
    };
    let computes_with_shards = mesh.shard_size() == WorldSize::ONE
        && options.offload == OffloadPolicy::None
        && (kind != DeviceKind::Flex || !cfg!(debug_assertions))
        && entries.iter().all(computed);
    entries.iter().any(ParamSpec::is_sharded) && !computes_with_shards
}
