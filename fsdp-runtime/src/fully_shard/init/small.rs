//! Small replicated parameters, which rank 0 broadcasts together: those of one unit in one tensor.
//!
//! A unit's are complete once the last of them was cut, in layout order. Until then a rank that
//! receives them holds stand-ins of one element, into whose place the values come at the end.

use std::collections::HashMap;

use burn::module::{ModuleMapper, Param, ParamId};
use burn::tensor::{DType, DispatchTensor, Shape, Tensor};

use crate::backend::{Float, ShardBackend};
use crate::layout::FlatLayout;
use crate::layout::WorldSize;
use crate::param_group::{ParamSpec, Placement, Unit};

/// Elements below which a parameter is small: it costs more to broadcast it by itself than to copy it.
const SMALL: usize = 1 << 16;

/// Whether the parameter is replicated and small.
pub(super) fn is_small(entry: &ParamSpec) -> bool {
    matches!(entry.held, Placement::Replicated) && (1..SMALL).contains(&entry.numel())
}

/// The small replicated parameters of one unit.
pub(super) struct Pack<B: ShardBackend> {
    /// How many there will be.
    all: usize,
    /// Those that were cut: ids and shapes.
    members: Vec<(ParamId, Shape)>,
    /// Their values, on rank 0.
    values: Vec<Float<B>>,
}

impl<B: ShardBackend> Pack<B> {
    /// That of a unit, of which `travels` names the entries.
    pub(super) fn new(unit: &Unit, travels: impl Fn(usize) -> bool) -> Self {
        let all = (0..unit.entries.len()).filter(|&entry| travels(entry)).count();
        Self { all, members: Vec::new(), values: Vec::new() }
    }

    /// Adds a parameter, with its value on rank 0. The pack, if it is complete.
    pub(super) fn add(
        &mut self,
        id: ParamId,
        shape: Shape,
        value: Option<Float<B>>,
    ) -> Option<Self> {
        self.members.push((id, shape));
        self.values.extend(value);
        let empty = Self { all: 0, members: Vec::new(), values: Vec::new() };
        (self.members.len() == self.all).then(|| std::mem::replace(self, empty))
    }

    fn layout(&self) -> FlatLayout {
        let numels = self.members.iter().map(|(_, shape)| shape.num_elements());
        FlatLayout::new(numels, WorldSize::ONE)
    }

    /// Elements of the tensor that travels.
    pub(super) fn numel(&self) -> usize {
        self.layout().padded_len()
    }

    /// The tensor that travels, from rank 0's values.
    pub(super) fn pack(&mut self, device: &B::Device) -> Float<B> {
        let layout = self.layout();
        let values = std::mem::take(&mut self.values).into_iter().enumerate();
        let parts = values.map(|(at, value)| (value, layout.segment(at).start)).collect();
        B::pack(parts, B::zeros(device, Shape::from([layout.padded_len()])))
    }

    /// Each parameter's value, from the tensor that has come.
    pub(super) fn unpack(self, packed: Float<B>) -> impl Iterator<Item = (ParamId, Float<B>)> {
        let layout = self.layout();
        let (ids, shapes): (Vec<_>, Vec<_>) = self.members.into_iter().unzip();
        let place = |(at, shape)| (layout.segment(at).start, shape);
        let parts = shapes.into_iter().enumerate().map(place).collect();
        ids.into_iter().zip(B::unpack(packed, parts, DType::F32, None))
    }
}

/// Puts values in the place of their stand-ins. A tied clone has its owner's id and comes after it.
pub(super) struct Fill(pub(super) HashMap<ParamId, DispatchTensor>);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(value) = self.0.remove(&param.id) else { return param };
        let (id, stand_in, mapper) = param.consume();
        let value = Tensor::from_dispatch(value).set_require_grad(stand_in.is_require_grad());
        Param::from_mapped_value(id, value, mapper)
    }
}
