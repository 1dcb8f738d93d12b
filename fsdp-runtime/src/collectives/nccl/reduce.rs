//! Reductions. What is in f32 NCCL sums, where it lies. Halves are not summed as halves: each rank
//! gets every rank's part of what it keeps, and sums them in f32, in rank order, as the other engines
//! do; that moves as many bytes. What all ranks keep whole is summed by NCCL, in f32. What a rank
//! keeps of a matrix follows from its flat range, so that each range is scattered on its own.

use std::sync::Arc;

use burn::tensor::{DType, FloatDType, Shape};

use super::NcclGroup;
use crate::backend::{Float, ShardBackend, cast};
use crate::collectives::{Op, Reduce};
use crate::error::CollectiveError;
use crate::layout::FlatLayout;
use crate::mesh::{Rank, WorldSize};
use crate::unit_layout::UnitLayout;

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
    fn is_summed(&self, entry: usize) -> bool {
        self.present.iter().any(|present| present[entry])
    }

    /// The flat range that a gradient is scattered with, if it is.
    fn range_of(&self, entry: usize) -> Option<usize> {
        self.keep[entry].segment.map(|segment| self.layout.range_of(segment))
    }

    /// A member's position, as a rank of the group.
    fn member(&self, index: usize) -> Rank {
        let size = WorldSize::new(self.present.len()).expect("a group has this rank");
        size.ranks().nth(index).expect("an index is below the size")
    }
}

type Sums<B> = Result<Vec<Option<Float<B>>>, CollectiveError>;

impl NcclGroup {
    /// The sums of this rank's parts, over the divisor; `None` where no rank has the gradient.
    pub(super) fn reduce<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        gradients: &[Option<Float<B>>],
        reduction: &Reduction<'_>,
    ) -> Sums<B> {
        let keep = reduction.keep;
        let halves =
            |entry: &usize| keep[*entry].segment.is_some() && keep[*entry].dtype != DType::F32;
        let summed = (0..keep.len()).filter(|&entry| reduction.is_summed(entry));
        let (exchanged, in_place): (Vec<usize>, Vec<usize>) = summed.partition(halves);
        let mut sums: Vec<Option<Float<B>>> = keep.iter().map(|_| None).collect();
        for (entry, sum) in self.sum_in_place::<B>(op, device, gradients, reduction, &in_place)? {
            sums[entry] = Some(sum);
        }
        for range in 0..reduction.layout.ranges().len() {
            let lies = |entry: &usize| reduction.range_of(*entry) == Some(range);
            let entries: Vec<usize> = exchanged.iter().copied().filter(lies).collect();
            let summed =
                self.sum_parts::<B>(op, device, gradients, reduction, (range, &entries))?;
            for (entry, sum) in summed {
                sums[entry] = Some(sum);
            }
        }
        Ok(sums)
    }

    /// Sums by NCCL, in f32.
    fn sum_in_place<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        gradients: &[Option<Float<B>>],
        reduction: &Reduction<'_>,
        entries: &[usize],
    ) -> Result<Vec<(usize, Float<B>)>, CollectiveError> {
        let Reduction { keep, layout, divisor, .. } = reduction;
        // The flat ranges that are scattered come first, then what all keep whole.
        let scatters =
            |range: usize| entries.iter().any(|&entry| reduction.range_of(entry) == Some(range));
        let scattered: Vec<usize> =
            (0..layout.ranges().len()).filter(|&range| scatters(range)).collect();
        let flat = |range: usize| &layout.ranges()[range].layout;
        let ranges = FlatLayout::new(
            scattered.iter().map(|&range| flat(range).padded_len()),
            WorldSize::ONE,
        );
        let base = ranges.padded_len();
        let whole = entries.iter().map(|&entry| match keep[entry].segment {
            Some(_) => 0,
            None => keep[entry].range.len(),
        });
        let whole = FlatLayout::new(whole, WorldSize::ONE);
        if base + whole.padded_len() == 0 {
            return Ok(Vec::new());
        }
        let slot = self.scratch::<B>(&self.sums, device, base + whole.padded_len(), DType::F32);
        let region = |at: usize| {
            let (start, within) = match (reduction.range_of(entries[at]), keep[entries[at]].segment)
            {
                (Some(range), Some(segment)) => {
                    let at = scattered.partition_point(|&other| other < range);
                    (ranges.segment(at).start, layout.segment(segment))
                }
                _ => (base, whole.segment(at)),
            };
            start + within.start..start + within.end
        };
        for (at, &entry) in entries.iter().enumerate() {
            let zeros = || B::float_zeros(Shape::from([region(at).len()]), device, FloatDType::F32);
            let gradient = gradients[entry].clone().unwrap_or_else(zeros);
            slot.write(region(at).start, cast::<B>(gradient, DType::F32));
        }
        let (index, size) = (self.host.index(), DType::F32.size());
        // SAFETY: the flat ranges of the layout and what comes after them lie within the slot, which
        // is this group's for sums, of which one is under way at a time.
        unsafe {
            self.run::<B>(op, device, &slot, |collectives, at| {
                for (place, &range) in scattered.iter().enumerate() {
                    let at = at + (ranges.segment(place).start * size) as u64;
                    collectives.reduce_scatter(at, index, flat(range).shard_len(), size)?;
                }
                if whole.padded_len() > 0 {
                    collectives.all_reduce(at + (base * size) as u64, whole.padded_len())?;
                }
                Ok(())
            })
        }?;
        let sum = |(at, &entry): (usize, &usize)| {
            let Reduce { range, shape, segment, .. } = &keep[entry];
            if range.is_empty() {
                return None;
            }
            let within = if segment.is_some() { range.start } else { 0 };
            let sum = slot.view(region(at).start + within, &[range.len()]);
            Some((entry, B::mean(&[sum], 0..range.len(), *divisor, shape.clone().into())))
        };
        Ok(entries.iter().enumerate().filter_map(sum).collect())
    }

    /// Sums here, of parts that the members send each other: gradients of matrices in one flat range.
    fn sum_parts<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        gradients: &[Option<Float<B>>],
        reduction: &Reduction<'_>,
        (range, entries): (usize, &[usize]),
    ) -> Result<Vec<(usize, Float<B>)>, CollectiveError> {
        let Reduction { keep, layout, divisor, present } = reduction;
        let Some(&first) = entries.first() else { return Ok(Vec::new()) };
        let dtype = keep[first].dtype;
        let (index, size) = (self.host.index(), self.size());
        let flat = &layout.ranges()[range].layout;
        let (shard, padded) = (flat.shard_len(), flat.padded_len());
        // The flat range as this rank has it; then this rank's shard of it, as each member has it.
        let slot = self.scratch::<B>(&self.parts, device, 2 * padded, dtype);
        for &entry in entries {
            if let (Some(gradient), Some(segment)) = (&gradients[entry], keep[entry].segment) {
                slot.write(layout.segment(segment).start, cast::<B>(gradient.clone(), dtype));
            }
        }
        // SAFETY: every shard, of every member, lies within the slot, which is this group's for
        // parts, of which one sum is under way at a time.
        unsafe {
            self.run::<B>(op, device, &slot, |collectives, at| {
                let place = |element: usize| at + (element * dtype.size()) as u64;
                for member in (0..size).filter(|&member| member != index) {
                    collectives.send(place(member * shard), shard, member)?;
                    collectives.receive(place(padded + member * shard), shard, member)?;
                }
                Ok(())
            })
        }?;
        let sum = |&entry: &usize| {
            let Reduce { range, shape, segment, .. } = &keep[entry];
            let segment = (*segment).filter(|_| !range.is_empty())?;
            debug_assert_eq!(*range, layout.fragment(segment, reduction.member(index)));
            let start = layout.segment(segment).start + range.start;
            let part = |member: usize| {
                let at = match member == index {
                    true => start,
                    false => padded + member * shard + start - index * shard,
                };
                present[member][entry].then(|| slot.view(at, &[range.len()]))
            };
            let parts: Vec<_> = (0..size).filter_map(part).collect();
            Some((entry, B::mean(&parts, 0..range.len(), *divisor, shape.clone().into())))
        };
        Ok(entries.iter().filter_map(sum).collect())
    }
}
