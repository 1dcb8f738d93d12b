//! Reductions: every rank gets every rank's gradient of what it keeps, and sums them in rank order.
//! Of what all ranks keep whole, each sums a part and sends it to the others. Gradients of several
//! types arrive one type after the other, as a buffer has one.

use std::ops::Range;

use burn::tensor::{DType, Shape};

use super::MpiGroup;
use super::transfer::Expected;
use crate::backend::{Float, ShardBackend};
use crate::collectives::Op;
use crate::collectives::regions::Reduction;
use crate::error::CollectiveError;
use crate::layout::FlatLayout;
use crate::layout::WorldSize;

impl MpiGroup {
    /// What member `index` keeps of a gradient, in elements: its shard, or, where all keep all,
    /// the part that it sums for everybody.
    fn part(&self, reduction: &Reduction<'_>, entry: usize, index: usize) -> Range<usize> {
        let keep = &reduction.keep[entry];
        match keep.segment {
            Some(segment) => reduction.layout.shard_of(segment, reduction.member(index)),
            None => {
                let len = keep.range.len().div_ceil(self.members.len());
                let start = (index * len).min(keep.range.len());
                start..(start + len).min(keep.range.len())
            }
        }
    }

    /// The sums of this rank's parts, over `divisor`; `None` where no rank has the gradient.
    pub(super) fn sum_parts<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        gradients: &[Option<Float<B>>],
        reduction: &Reduction<'_>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let keep = reduction.keep;
        let mut sums: Vec<Option<Float<B>>> = keep.iter().map(|_| None).collect();
        // The same order on every rank, which knows the type of each gradient, its own or not.
        let mut left: Vec<usize> = (0..keep.len()).collect();
        while let Some(dtype) = left.first().map(|&entry| keep[entry].dtype) {
            let entries: Vec<usize> =
                left.extract_if(.., |entry| keep[*entry].dtype == dtype).collect();
            let summed =
                self.sum_parts_of::<B>(op, device, gradients, reduction, (&entries, dtype))?;
            for (entry, sum) in entries.into_iter().zip(summed) {
                sums[entry] = sum;
            }
        }
        Ok(sums)
    }

    /// As [`sum_parts`](Self::sum_parts), of the entries whose gradients travel in one type.
    fn sum_parts_of<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        gradients: &[Option<Float<B>>],
        reduction: &Reduction<'_>,
        (entries, dtype): (&[usize], DType),
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let Reduction { keep, divisor, present, .. } = reduction;
        let size = self.members.len();
        // Where each member's part of each gradient arrives.
        let mut lens = Vec::with_capacity(entries.len() * size);
        for &entry in entries {
            let len = self.part(reduction, entry, self.index).len();
            lens.extend((0..size).map(|from| if from == self.index { 0 } else { len }));
        }
        let regions = FlatLayout::new(lens, WorldSize::ONE);
        let slot = self.parts.slot::<B>(device, regions.padded_len(), dtype);
        let mut expected = Vec::new();
        for (at, &entry) in entries.iter().enumerate() {
            for from in self.others().filter(|&from| present[from][entry]) {
                let range = regions.segment(at * size + from);
                expected.push(Expected { from, tag: entry, range });
            }
        }
        let host = |&entry: &usize| Some((entry, B::host(gradients[entry].clone()?)));
        let sent: Vec<_> = entries.iter().filter_map(host).collect();
        self.land(op, &slot, device, &expected, sent, |sent, transfers| {
            for (entry, elements) in sent {
                let entry = *entry;
                for to in self.others() {
                    let part = self.part(reduction, entry, to);
                    let part = part.start * dtype.size()..part.end * dtype.size();
                    // SAFETY: `land` keeps `sent`, and with it the elements' place in memory.
                    unsafe { self.send(transfers, to, entry, &elements.as_ref()[part]) };
                }
            }
        })?;
        let mean = |(at, &entry): (usize, &usize)| {
            let (keep, range) = (&keep[entry], self.part(reduction, entry, self.index));
            if range.is_empty() {
                return None;
            }
            let part = |from: usize| match from == self.index {
                true => {
                    let own = gradients[entry].clone()?;
                    Some(B::copy_range(own, range.clone(), Shape::from([range.len()])))
                }
                false => present[from][entry]
                    .then(|| slot.view(regions.segment(at * size + from).start, &[range.len()])),
            };
            let parts: Vec<_> = (0..size).filter_map(part).collect();
            let whole = size == 1 || keep.segment.is_some();
            let shape = if whole { keep.shape.clone() } else { vec![range.len()] };
            (!parts.is_empty()).then(|| B::mean(&parts, 0..range.len(), *divisor, shape.into()))
        };
        Ok(entries.iter().enumerate().map(mean).collect())
    }

    /// The gradients that every rank keeps whole, from the parts of them that each has summed.
    pub(super) fn join_parts<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        sums: &mut [Option<Float<B>>],
        reduction: &Reduction<'_>,
    ) -> Result<(), CollectiveError> {
        let keep = reduction.keep;
        let whole = |&entry: &usize| {
            keep[entry].segment.is_none()
                && !keep[entry].range.is_empty()
                && reduction.is_summed(entry)
        };
        let entries: Vec<usize> = (0..keep.len()).filter(whole).collect();
        if entries.is_empty() {
            return Ok(());
        }
        let regions =
            FlatLayout::new(entries.iter().map(|&entry| keep[entry].range.len()), WorldSize::ONE);
        let slot = self.whole.slot::<B>(device, regions.padded_len(), DType::F32);
        let mut expected = Vec::new();
        let (mut mine, mut own) = (Vec::new(), Vec::new());
        for (at, &entry) in entries.iter().enumerate() {
            let start = regions.segment(at).start;
            let place = |index| {
                let part = self.part(reduction, entry, index);
                start + part.start..start + part.end
            };
            for from in self.others() {
                expected.push(Expected { from, tag: keep.len() + entry, range: place(from) });
            }
            if let Some(sum) = sums[entry].take() {
                mine.push((place(self.index).start, sum.clone()));
                own.push((entry, B::host(sum)));
            }
        }
        slot.write_all(mine);
        self.land(op, &slot, device, &expected, own, |own, transfers| {
            for (entry, sum) in own {
                for to in self.others() {
                    // SAFETY: `land` keeps `own`, and with it the elements' place in memory.
                    unsafe { self.send(transfers, to, keep.len() + entry, sum.as_ref()) };
                }
            }
        })?;
        let part = |(at, &entry): (usize, &usize)| {
            (regions.segment(at).start, Shape::from(keep[entry].shape.clone()))
        };
        let parts = entries.iter().enumerate().map(part).collect();
        let all = slot.view(0, &[regions.padded_len()]);
        for (&entry, sum) in entries.iter().zip(B::unpack(all, parts, DType::F32, None)) {
            sums[entry] = Some(sum);
        }
        Ok(())
    }
}
