//! Reductions over NCCL.
//!
//! NCCL sums f32 gradients in place: it reduce-scatters the flat ranges of sharded parameters, each
//! on its own, and all-reduces replicated gradients. NCCL does not sum sharded gradients in half
//! precision: each rank receives all ranks' parts of its shard and sums them in f32, in rank order,
//! as the other engines do. This moves as many bytes. Replicated gradients in half precision
//! are converted to f32 and summed by NCCL.

use std::ops::Range;

use burn::tensor::{DType, FloatDType, Shape};
use fsdp_kernels::RankMean;

use super::group::NcclGroup;
use crate::backend::{Float, ShardBackend};
use crate::collectives::op::Op;
use crate::collectives::process_group::{Reduce, means_of};
use crate::collectives::regions::Reduction;
use crate::error::CollectiveError;
use crate::layout::{FlatLayout, WorldSize};

/// Sums of gradients, each with its entry.
type Sums<B> = Vec<(usize, Float<B>)>;

impl Reduction<'_> {
    /// Returns the index of the flat range that a sharded gradient lies in; `None` for a replicated
    /// one.
    fn flat_range_of(&self, entry: usize) -> Option<usize> {
        self.keep[entry].segment.map(|segment| self.layout.range_of(segment))
    }

    /// Returns the layout of a flat range.
    fn flat(&self, range: usize) -> &FlatLayout {
        &self.layout.ranges()[range].layout
    }
}

/// The buffer in which NCCL sums gradients: first the flat ranges to reduce-scatter, then the
/// replicated gradients to all-reduce. Positions and lengths are in elements.
struct SumRegions<'a> {
    reduction: &'a Reduction<'a>,
    /// Gradients that are summed.
    entries: &'a [usize],
    /// Indices of the flat ranges that are reduce-scattered, in ascending order.
    scattered: Vec<usize>,
    /// Regions of these flat ranges.
    flat_ranges: FlatLayout,
    /// Regions of the replicated gradients, relative to the end of the flat ranges. Each entry has
    /// one, which is empty for a sharded gradient.
    replicated: FlatLayout,
}

impl<'a> SumRegions<'a> {
    fn new(reduction: &'a Reduction<'a>, entries: &'a [usize]) -> Self {
        let is_scattered = |range: &usize| {
            entries.iter().any(|&entry| reduction.flat_range_of(entry) == Some(*range))
        };
        let scattered: Vec<usize> =
            (0..reduction.layout.ranges().len()).filter(is_scattered).collect();
        let flat_lens = scattered.iter().map(|&range| reduction.flat(range).padded_len());
        let flat_ranges = FlatLayout::new(flat_lens, WorldSize::ONE);
        let replicated_lens = entries.iter().map(|&entry| match reduction.keep[entry].segment {
            Some(_) => 0,
            None => reduction.keep[entry].range.len(),
        });
        let replicated = FlatLayout::new(replicated_lens, WorldSize::ONE);
        Self { reduction, entries, scattered, flat_ranges, replicated }
    }

    /// Returns the length of the buffer.
    fn len(&self) -> usize {
        self.replicated_start() + self.replicated.padded_len()
    }

    /// Returns where the replicated gradients begin.
    fn replicated_start(&self) -> usize {
        self.flat_ranges.padded_len()
    }

    /// Returns the region of the full gradient at position `at` of `entries`.
    fn gradient(&self, at: usize) -> Range<usize> {
        let entry = self.entries[at];
        let segment = self.reduction.keep[entry].segment;
        let (start, within) = match (self.reduction.flat_range_of(entry), segment) {
            (Some(range), Some(segment)) => {
                let position = self.scattered.partition_point(|&other| other < range);
                let start = self.flat_ranges.segment(position).start;
                (start, self.reduction.layout.segment(segment))
            }
            _ => (self.replicated_start(), self.replicated.segment(at)),
        };
        start + within.start..start + within.end
    }

    /// Returns the entry at position `at`, with the start and shape of the elements that the
    /// calling rank keeps; `None` if it keeps none.
    fn kept(&self, at: usize) -> Option<(usize, (usize, Shape))> {
        let entry = self.entries[at];
        let Reduce { range, shape, segment, .. } = &self.reduction.keep[entry];
        let within = if segment.is_some() { range.start } else { 0 };
        let part = (self.gradient(at).start + within, Shape::from(shape.clone()));
        (!range.is_empty()).then_some((entry, part))
    }
}

impl NcclGroup {
    /// Sums each gradient over the members and divides it; returns the elements that this rank
    /// keeps. A sum is absent where no rank has the gradient.
    pub(super) fn reduce<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        gradients: &[Option<Float<B>>],
        reduction: &Reduction<'_>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let keep = reduction.keep;
        let is_sharded_half =
            |entry: &usize| keep[*entry].segment.is_some() && keep[*entry].dtype != DType::F32;
        let summed = (0..keep.len()).filter(|&entry| reduction.is_summed(entry));
        let (exchanged, in_place): (Vec<usize>, Vec<usize>) = summed.partition(is_sharded_half);
        let mut sums: Vec<Option<Float<B>>> = keep.iter().map(|_| None).collect();
        for (entry, sum) in self.sum_in_place::<B>(op, device, gradients, reduction, &in_place)? {
            sums[entry] = Some(sum);
        }
        for range in 0..reduction.layout.ranges().len() {
            let lies_in_range = |entry: &usize| reduction.flat_range_of(*entry) == Some(range);
            let entries: Vec<usize> = exchanged.iter().copied().filter(lies_in_range).collect();
            for (entry, sum) in self.sum_parts::<B>(op, device, gradients, reduction, &entries)? {
                sums[entry] = Some(sum);
            }
        }
        Ok(sums)
    }

    /// Sums gradients by NCCL, in f32.
    fn sum_in_place<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        gradients: &[Option<Float<B>>],
        reduction: &Reduction<'_>,
        entries: &[usize],
    ) -> Result<Sums<B>, CollectiveError> {
        let regions = SumRegions::new(reduction, entries);
        if regions.len() == 0 {
            return Ok(Vec::new());
        }
        let buffer = self.sum_buffers.buffer::<B>(device, regions.len(), DType::F32);
        let own = |(at, &entry): (usize, &usize)| {
            let region = regions.gradient(at);
            let zeros = || B::float_zeros(Shape::from([region.len()]), device, FloatDType::F32);
            (region.start, gradients[entry].clone().unwrap_or_else(zeros))
        };
        buffer.write_all(entries.iter().enumerate().map(own).collect());
        let (index, size) = (self.host.index(), DType::F32.size());
        // SAFETY: the regions lie within the buffer. Only this function uses the group's sum
        // buffers, and one sum runs at a time.
        unsafe {
            self.run::<B>(op, device, &buffer, |collectives, start| {
                for (position, &range) in regions.scattered.iter().enumerate() {
                    let at = start + (regions.flat_ranges.segment(position).start * size) as u64;
                    collectives.reduce_scatter(
                        at,
                        index,
                        reduction.flat(range).shard_len(),
                        size,
                    )?;
                }
                if regions.replicated.padded_len() > 0 {
                    let at = start + (regions.replicated_start() * size) as u64;
                    collectives.all_reduce(at, regions.replicated.padded_len())?;
                }
                Ok(())
            })
        }?;
        let (entries, parts): (Vec<_>, Vec<_>) =
            (0..entries.len()).filter_map(|at| regions.kept(at)).unzip();
        let full = buffer.view(0, &[regions.len()]);
        let divisor = (reduction.divisor > 1).then_some(reduction.divisor as f32);
        Ok(entries.into_iter().zip(B::unpack(full, parts, DType::F32, divisor)).collect())
    }

    /// Sums sharded gradients in rank order, from parts that the members send each other. All
    /// `entries` lie in one flat range.
    fn sum_parts<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        gradients: &[Option<Float<B>>],
        reduction: &Reduction<'_>,
        entries: &[usize],
    ) -> Result<Sums<B>, CollectiveError> {
        let Reduction { keep, layout, divisor, present } = reduction;
        let Some(&first) = entries.first() else { return Ok(Vec::new()) };
        let Some(flat_range) = reduction.flat_range_of(first) else { return Ok(Vec::new()) };
        let dtype = keep[first].dtype;
        let (index, size) = (self.host.index(), self.size());
        let flat = reduction.flat(flat_range);
        let (shard_len, padded_len) = (flat.shard_len(), flat.padded_len());
        // The first half is this rank's flat range, the second half this rank's shard as each
        // member has it, in rank order.
        let buffer = self.part_buffers.buffer::<B>(device, 2 * padded_len, dtype);
        let own = |&entry: &usize| {
            Some((layout.segment(keep[entry].segment?).start, gradients[entry].clone()?))
        };
        buffer.write_all(entries.iter().filter_map(own).collect());
        // SAFETY: all members' shards lie within the buffer. Only this function uses the group's
        // part buffers, and one sum runs at a time.
        unsafe {
            self.run::<B>(op, device, &buffer, |collectives, start| {
                let address = |element: usize| start + (element * dtype.size()) as u64;
                for member in (0..size).filter(|&member| member != index) {
                    collectives.send(address(member * shard_len), shard_len, member)?;
                    let received = address(padded_len + member * shard_len);
                    collectives.receive(received, shard_len, member)?;
                }
                Ok(())
            })
        }?;
        let sum = |&entry: &usize| {
            let Reduce { range, shape, segment, .. } = &keep[entry];
            let segment = (*segment).filter(|_| !range.is_empty())?;
            debug_assert_eq!(*range, layout.shard_of(segment, reduction.member(index)));
            let start = layout.segment(segment).start + range.start;
            let part = |member: usize| {
                let at = match member == index {
                    true => start,
                    false => padded_len + member * shard_len + start - index * shard_len,
                };
                present[member][entry].then(|| (buffer.view(at, &[range.len()]), 0))
            };
            let parts = (0..size).filter_map(part).collect();
            Some((entry, RankMean { parts, divisor: *divisor, shape: shape.clone().into() }))
        };
        Ok(means_of::<B>(entries.iter().filter_map(sum)).collect())
    }
}
