//! Reductions. What is in f32 NCCL sums, where it lies. Halves are not summed as halves: each rank
//! gets every rank's part of what it keeps, and sums them in f32, in rank order, as the other engines
//! do; that moves as many bytes. What all ranks keep whole is summed by NCCL, in f32. What a rank
//! keeps of a matrix follows from its flat range, so that each range is scattered on its own.

use burn::tensor::{DType, FloatDType, Shape};

use super::NcclGroup;
use crate::backend::{Float, ShardBackend};
use crate::collectives::regions::Reduction;
use crate::collectives::{Op, Reduce};
use crate::error::CollectiveError;
use crate::layout::FlatLayout;
use crate::layout::WorldSize;

impl Reduction<'_> {
    /// The flat range that a gradient is scattered with, if it is.
    fn range_of(&self, entry: usize) -> Option<usize> {
        self.keep[entry].segment.map(|segment| self.layout.range_of(segment))
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
        let slot = self.sums.slot::<B>(device, base + whole.padded_len(), DType::F32);
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
        let own = |(at, &entry): (usize, &usize)| {
            let zeros = || B::float_zeros(Shape::from([region(at).len()]), device, FloatDType::F32);
            (region(at).start, gradients[entry].clone().unwrap_or_else(zeros))
        };
        slot.write_all(entries.iter().enumerate().map(own).collect());
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
        let kept = |(at, &entry): (usize, &usize)| {
            let Reduce { range, shape, segment, .. } = &keep[entry];
            let within = if segment.is_some() { range.start } else { 0 };
            let part = (region(at).start + within, Shape::from(shape.clone()));
            (!range.is_empty()).then_some((entry, part))
        };
        let (entries, parts): (Vec<_>, Vec<_>) =
            entries.iter().enumerate().filter_map(kept).unzip();
        let all = slot.view(0, &[base + whole.padded_len()]);
        let divisor = (*divisor > 1).then_some(*divisor as f32);
        Ok(entries.into_iter().zip(B::unpack(all, parts, DType::F32, divisor)).collect())
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
        let slot = self.parts.slot::<B>(device, 2 * padded, dtype);
        let own = |&entry: &usize| {
            Some((layout.segment(keep[entry].segment?).start, gradients[entry].clone()?))
        };
        slot.write_all(entries.iter().filter_map(own).collect());
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
            debug_assert_eq!(*range, layout.shard_of(segment, reduction.member(index)));
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
