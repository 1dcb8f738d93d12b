//! Buffers and bookkeeping that the engines `mpi` and `nccl` share: receive buffers with a region
//! for each member, buffers reused between collectives, and the facts of a reduction that all ranks
//! know.

use std::any::Any;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};

use super::process_group::Reduce;
use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{Float, ShardBackend, numel};
use crate::error::IgnorePoison;
use crate::layout::{FlatLayout, Rank, UnitLayout, WorldSize};

/// What a member announces of its tensor: the number of elements and their type; `None` without a tensor.
pub(super) type Announced = Option<(usize, DType)>;

/// Returns what a member announces.
pub(super) fn announced<B: ShardBackend>(tensor: Option<&Float<B>>) -> Announced {
    tensor.map(|tensor| (numel::<B>(tensor), tensor.dtype()))
}

/// A buffer of one collective, with a region for the tensor of each member, in the type of the tensors.
pub(super) struct MemberRegions<B: ShardBackend> {
    pub(super) buffer: Arc<GatherBuffer<B>>,
    /// Number of elements of each member's tensor; `None` for a member without one.
    lens: Vec<Option<usize>>,
    regions: FlatLayout,
}

impl<B: ShardBackend> MemberRegions<B> {
    /// Allocates a buffer with regions for the members that `has_region` selects, by position.
    pub(super) fn new(
        device: &B::Device,
        announced: impl IntoIterator<Item = Announced>,
        has_region: impl Fn(usize) -> bool,
    ) -> Self {
        let mut dtype = DType::F32;
        let len = |announced: Announced| {
            let (len, of_tensor) = announced?;
            dtype = of_tensor;
            Some(len)
        };
        let lens: Vec<_> = announced.into_iter().map(len).collect();
        let region_len =
            |(member, len): (usize, &Option<usize>)| len.filter(|_| has_region(member));
        let region_lens = lens.iter().enumerate().map(|member| region_len(member).unwrap_or(0));
        let regions = FlatLayout::new(region_lens, WorldSize::ONE);
        let buffer = Arc::new(GatherBuffer::<B>::new(device, regions.padded_len(), dtype));
        Self { buffer, lens, regions }
    }

    /// Returns the region of a member's tensor, in elements; empty for a member without a region.
    pub(super) fn region(&self, member: usize) -> Range<usize> {
        self.regions.segment(member)
    }

    /// Returns the non-empty regions with the positions of their members.
    pub(super) fn regions(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let regions = (0..self.lens.len()).map(|member| (member, self.region(member)));
        regions.filter(|(_, region)| !region.is_empty())
    }

    /// Returns the byte of the buffer at which a region begins.
    #[cfg(feature = "nccl")]
    pub(super) fn byte(&self, region: &Range<usize>) -> u64 {
        (region.start * self.buffer.dtype().size()) as u64
    }

    /// Returns every member's tensor, flattened, in rank order, once the buffer is filled.
    ///
    /// The tensor of the member at `index` is `own`, unchanged, and not read from the buffer.
    pub(super) fn into_tensors(self, index: usize, own: Option<Float<B>>) -> Vec<Option<Float<B>>> {
        let received = |member: usize| self.lens[member].filter(|_| member != index);
        let part =
            |member: usize| Some((self.region(member).start, Shape::from([received(member)?])));
        let parts: Vec<_> = (0..self.lens.len()).filter_map(part).collect();
        let full = self.buffer.view(0, &[self.regions.padded_len()]);
        let mut tensors = B::unpack(full, parts, self.buffer.dtype(), None).into_iter();
        let mut tensor = |member: usize| received(member).and_then(|_| tensors.next());
        let mut tensors: Vec<_> = (0..self.lens.len()).map(&mut tensor).collect();
        tensors[index] = own;
        tensors
    }
}

/// What a member says of the tensor that it broadcasts.
pub(super) type ShapeAndType = (Vec<usize>, DType);

/// The root of a broadcast, found from the shapes that the members have exchanged.
pub(super) struct BroadcastRoot {
    /// Position of the one member that passes a tensor.
    pub(super) index: usize,
    /// Shape of that tensor.
    pub(super) shape: Shape,
    /// What each member announces: `None` for all but the root.
    pub(super) announced: Vec<Announced>,
}

impl BroadcastRoot {
    /// Finds the root: the one member with a shape and a type.
    ///
    /// # Panics
    ///
    /// Panics on every rank unless exactly one member has a shape.
    pub(super) fn find(shapes: &[Arc<Option<ShapeAndType>>]) -> Self {
        let mut given =
            shapes.iter().enumerate().filter_map(|(at, shape)| Some((at, (**shape).clone()?)));
        let (index, (shape, dtype)) = given.next().expect("a rank passes the tensor to broadcast");
        assert!(given.next().is_none(), "only one rank passes the tensor to broadcast");
        let shape = Shape::from(shape);
        let mut announced = vec![None; shapes.len()];
        announced[index] = Some((shape.num_elements(), dtype));
        Self { index, shape, announced }
    }
}

/// Buffers that are reused from one collective to the next: one for each element type, of whichever
/// backend last asked for that type.
#[derive(Debug, Default)]
pub(super) struct ReusedBuffers(Mutex<HashMap<DType, Box<dyn Any + Send>>>);

impl ReusedBuffers {
    /// Returns the buffer for `dtype`, allocating a new one if it has fewer than `numel` elements.
    pub(super) fn buffer<B: ShardBackend>(
        &self,
        device: &B::Device,
        numel: usize,
        dtype: DType,
    ) -> Arc<GatherBuffer<B>> {
        let mut buffers = self.0.lock().ignore_poison();
        let buffer = buffers.get(&dtype).and_then(|any| any.downcast_ref::<Arc<GatherBuffer<B>>>());
        if let Some(buffer) = buffer.filter(|buffer| buffer.numel() >= numel) {
            return buffer.clone();
        }
        let buffer = Arc::new(GatherBuffer::<B>::new(device, numel, dtype));
        buffers.insert(dtype, Box::new(buffer.clone()));
        buffer
    }
}

/// Description of a reduction, equal on all ranks but for the ranges. A gradient's *entry* is its
/// index in `keep`.
pub(super) struct Reduction<'a> {
    /// Reduction of each gradient; ranges are those of the calling rank.
    pub(super) keep: &'a [Reduce],
    /// Layout of the gradients' unit over the members.
    pub(super) layout: &'a UnitLayout,
    /// Number that each sum is divided by.
    pub(super) divisor: usize,
    /// Flags of the gradients that each member has, by member and entry.
    pub(super) present: Vec<Arc<Vec<bool>>>,
}

impl Reduction<'_> {
    /// Returns whether any member has this gradient.
    pub(super) fn is_summed(&self, entry: usize) -> bool {
        self.present.iter().any(|present| present[entry])
    }

    /// Converts a member's position to a rank of the process group.
    pub(super) fn member(&self, index: usize) -> Rank {
        let size = WorldSize::new(self.present.len()).expect("a process group has a member");
        size.ranks().nth(index).expect("an index is below the size")
    }
}
