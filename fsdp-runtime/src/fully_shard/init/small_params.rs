//! Small replicated parameters. Rank 0 broadcasts those of one unit together, as one tensor.
//!
//! The parameters of a unit are complete once the last of them is initialised, in layout order.
//! Until then a rank that receives them has placeholders of one element in the model, which the
//! received values replace at the end.

use std::collections::HashMap;

use burn::module::{ModuleMapper, Param, ParamId};
use burn::tensor::{DType, DispatchTensor, Shape, Tensor};

use super::param_value::part;
use crate::backend::{Float, ShardBackend};
use crate::layout::{FlatLayout, StorageType, WorldSize};
use crate::param_group::{ParamSpec, Placement, Unit};

/// Number of elements below which a parameter is small: a separate broadcast would take longer than
/// the copies into and out of a common tensor.
const SMALL: usize = 1 << 16;

/// Returns whether a parameter is replicated and small.
pub(super) fn is_small(spec: &ParamSpec) -> bool {
    matches!(spec.placement, Placement::Replicated) && (1..SMALL).contains(&spec.whole_numel())
}

/// The small replicated parameters of one unit.
pub(super) struct SmallParams<B: ShardBackend> {
    /// Number of parameters when complete.
    count: usize,
    /// Ids and descriptions of the parameters that were added.
    added: Vec<(ParamId, ParamSpec)>,
    /// Values of the parameters that were added, in f32, on rank 0.
    values: Vec<Float<B>>,
}

impl<B: ShardBackend> SmallParams<B> {
    /// Returns the collection for a unit, still empty. `includes` selects the unit's parameters by
    /// number.
    pub(super) fn new(unit: &Unit, includes: impl Fn(usize) -> bool) -> Self {
        let count = (0..unit.params.len()).filter(|&entry| includes(entry)).count();
        Self { count, added: Vec::new(), values: Vec::new() }
    }

    /// Adds a parameter, on rank 0 with its value. Returns the collection once it is complete.
    pub(super) fn add(
        &mut self,
        id: ParamId,
        spec: &ParamSpec,
        value: Option<Float<B>>,
    ) -> Option<Self> {
        self.added.push((id, spec.clone()));
        self.values.extend(value);
        let empty = Self { count: 0, added: Vec::new(), values: Vec::new() };
        (self.added.len() == self.count).then(|| std::mem::replace(self, empty))
    }

    fn layout(&self) -> FlatLayout {
        let numels = self.added.iter().map(|(_, spec)| spec.whole_numel());
        FlatLayout::new(numels, WorldSize::ONE)
    }

    /// Returns the number of elements of the tensor that is broadcast.
    pub(super) fn numel(&self) -> usize {
        self.layout().padded_len()
    }

    /// Returns the tensor to broadcast, from rank 0's values.
    pub(super) fn pack(&mut self, device: &B::Device) -> Float<B> {
        let layout = self.layout();
        let values = std::mem::take(&mut self.values).into_iter().enumerate();
        let parts = values.map(|(at, value)| (value, layout.segment(at).start)).collect();
        B::pack(parts, B::zeros(device, Shape::from([layout.padded_len()])))
    }

    /// Returns what this rank stores of each parameter, from the received tensor.
    pub(super) fn unpack(
        self,
        packed: Float<B>,
        device: &B::Device,
    ) -> impl Iterator<Item = (ParamId, Float<B>)> {
        let layout = self.layout();
        let place = |(at, (_, spec)): (usize, &(ParamId, ParamSpec))| {
            (layout.segment(at).start, Shape::from(spec.whole_shape()))
        };
        let places = self.added.iter().enumerate().map(place).collect();
        let values = B::unpack(packed, places, DType::F32, None);
        let stored = |((id, spec), value): ((ParamId, ParamSpec), Float<B>)| {
            (
                id,
                if spec.storage == StorageType::F32 && spec.split.is_none() {
                    value
                } else {
                    part::<B>(value, &spec, device)
                },
            )
        };
        self.added.into_iter().zip(values).map(stored)
    }
}

/// Replaces the placeholders of a model by received values.
///
/// The alias of a tied weight can have the id of the owner. It comes after the owner, and is not
/// changed.
pub(super) struct ReplacePlaceholders(pub(super) HashMap<ParamId, DispatchTensor>);

impl ModuleMapper for ReplacePlaceholders {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(value) = self.0.remove(&param.id) else { return param };
        let (id, placeholder, mapper) = param.consume();
        let value = Tensor::from_dispatch(value).set_require_grad(placeholder.is_require_grad());
        Param::from_mapped_value(id, value, mapper)
    }
}
