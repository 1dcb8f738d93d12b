//! What the engines that move data through buffers share: where each member's tensor arrives, buffers
//! that are kept, and what all ranks know of a reduction. How the data gets there is the engines'.

use std::any::Any;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use burn::tensor::{DType, Shape};

use super::Reduce;
use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{Float, ShardBackend};
use crate::layout::FlatLayout;
use crate::layout::UnitLayout;
use crate::layout::{Rank, WorldSize};

/// Room for one tensor of each member, in f32, in a buffer of one collective's own.
pub(super) struct Arrivals<B: ShardBackend> {
    pub(super) slot: Arc<GatherBuffer<B>>,
    /// Elements of each member's tensor, where it has one.
    lens: Vec<Option<usize>>,
    regions: FlatLayout,
}

impl<B: ShardBackend> Arrivals<B> {
    /// Room for the tensors of those members that `here` says.
    pub(super) fn new(
        device: &B::Device,
        lens: Vec<Option<usize>>,
        here: impl Fn(usize) -> bool,
    ) -> Self {
        let room = |(member, len): (usize, &Option<usize>)| len.filter(|_| here(member));
        let room = lens.iter().enumerate().map(|of| room(of).unwrap_or(0));
        let regions = FlatLayout::new(room, WorldSize::ONE);
        let slot = Arc::new(GatherBuffer::<B>::new(device, regions.padded_len(), DType::F32));
        Self { slot, lens, regions }
    }

    /// Where a member's tensor lies, in elements; empty where there is no room for it.
    pub(super) fn region(&self, member: usize) -> Range<usize> {
        self.regions.segment(member)
    }

    /// The members there is room for, and where their tensors lie.
    pub(super) fn regions(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let regions = (0..self.lens.len()).map(|member| (member, self.region(member)));
        regions.filter(|(_, region)| !region.is_empty())
    }

    /// Every member's tensor, flat, in rank order, once all have arrived; that of the member at
    /// `index` is `own`, as it is.
    pub(super) fn into_tensors(self, index: usize, own: Option<Float<B>>) -> Vec<Option<Float<B>>> {
        let arrived = |member: usize| self.lens[member].filter(|_| member != index);
        let part =
            |member: usize| Some((self.region(member).start, Shape::from([arrived(member)?])));
        let parts: Vec<_> = (0..self.lens.len()).filter_map(part).collect();
        let all = self.slot.view(0, &[self.regions.padded_len()]);
        let mut tensors = B::unpack(all, parts, DType::F32, None).into_iter();
        let mut tensor = |member: usize| arrived(member).and_then(|_| tensors.next());
        let mut tensors: Vec<_> = (0..self.lens.len()).map(&mut tensor).collect();
        tensors[index] = own;
        tensors
    }
}

/// The root, which is the one member that has told a shape, that shape, and how many elements arrive of
/// each member when that one alone sends.
///
/// # Panics
///
/// Unless one has, on every rank alike.
pub(super) fn root_of(shapes: &[Arc<Option<Vec<usize>>>]) -> (usize, Shape, Vec<Option<usize>>) {
    let mut told =
        shapes.iter().enumerate().filter_map(|(at, shape)| Some((at, (**shape).clone()?)));
    let (root, shape) = told.next().expect("a rank gives the tensor");
    assert!(told.next().is_none(), "one rank gives the tensor");
    let shape = Shape::from(shape);
    let mut lens = vec![None; shapes.len()];
    lens[root] = Some(shape.num_elements());
    (root, shape, lens)
}

/// Buffers that are kept from one collective to the next, of whatever backend, one for each type of
/// elements.
#[derive(Debug, Default)]
pub(super) struct Scratch(Mutex<HashMap<DType, Box<dyn Any + Send>>>);

impl Scratch {
    /// The buffer, of at least `numel` elements of a type: the kept one where it will do.
    pub(super) fn slot<B: ShardBackend>(
        &self,
        device: &B::Device,
        numel: usize,
        dtype: DType,
    ) -> Arc<GatherBuffer<B>> {
        let mut kept = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let slot = kept.get(&dtype).and_then(|slot| slot.downcast_ref::<Arc<GatherBuffer<B>>>());
        if let Some(slot) = slot.filter(|slot| slot.numel() >= numel) {
            return slot.clone();
        }
        let slot = Arc::new(GatherBuffer::<B>::new(device, numel, dtype));
        kept.insert(dtype, Box::new(slot.clone()));
        slot
    }
}

/// What all ranks know of a reduction.
pub(super) struct Reduction<'a> {
    pub(super) keep: &'a [Reduce],
    pub(super) layout: &'a UnitLayout,
    pub(super) divisor: usize,
    /// Which member has which gradient.
    pub(super) present: Vec<Arc<Vec<bool>>>,
}

impl Reduction<'_> {
    /// Whether any rank has this gradient.
    pub(super) fn is_summed(&self, entry: usize) -> bool {
        self.present.iter().any(|present| present[entry])
    }

    /// A member's position, as a rank of the group.
    pub(super) fn member(&self, index: usize) -> Rank {
        let size = WorldSize::new(self.present.len()).expect("a group has this rank");
        size.ranks().nth(index).expect("an index is below the size")
    }
}
