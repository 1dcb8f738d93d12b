//! Reductions over MPI. Every rank receives all ranks' gradients of the elements it keeps, and sums
//! them in rank order. Of a replicated gradient, each rank sums a part and sends the sum to the
//! others. Gradients of several types are exchanged one type after the other, since a buffer has
//! one type.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Shape};
use fsdp_kernels::RankMean;

use super::group::MpiGroup;
use super::transfer::{Expected, Receive};
use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{Float, ShardBackend};
use crate::collectives::op::Op;
use crate::collectives::process_group::means_of;
use crate::collectives::regions::Reduction;
use crate::error::CollectiveError;
use crate::layout::{FlatLayout, WorldSize};

/// The parts of gradients that this rank receives, and the buffer that they are received in.
struct ReceivedParts<'a, B: ShardBackend> {
    /// Gradients that are received, all of one type.
    entries: &'a [usize],
    /// Region of each part, in the order of `entries` and, for one entry, of the members.
    regions: FlatLayout,
    buffer: Arc<GatherBuffer<B>>,
}

impl MpiGroup {
    /// Returns the elements of a gradient that member `index` sums: its shard of a sharded
    /// parameter, or an equal part of a replicated one.
    fn summed_part(&self, reduction: &Reduction<'_>, entry: usize, index: usize) -> Range<usize> {
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

    /// Sums this rank's parts of all gradients, and divides them. A sum is absent where no rank has
    /// the gradient, or where this rank's part is empty.
    pub(super) fn sum_parts<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        gradients: &[Option<Float<B>>],
        reduction: &Reduction<'_>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let keep = reduction.keep;
        let mut sums: Vec<Option<Float<B>>> = keep.iter().map(|_| None).collect();
        // Every rank knows the type of each gradient, present or not, so all use the same order. A
        // gradient that no rank has takes no memory.
        let mut left: Vec<usize> =
            (0..keep.len()).filter(|&entry| reduction.is_summed(entry)).collect();
        while let Some(dtype) = left.first().map(|&entry| keep[entry].dtype) {
            let entries: Vec<usize> =
                left.extract_if(.., |entry| keep[*entry].dtype == dtype).collect();
            let received = self.exchange_parts::<B>(op, device, gradients, reduction, &entries)?;
            let mean = |at| self.mean_of_part(gradients, reduction, &received, at);
            for (entry, sum) in means_of::<B>((0..entries.len()).filter_map(mean)) {
                sums[entry] = Some(sum);
            }
        }
        Ok(sums)
    }

    /// Sends every member its parts of this rank's gradients, and receives this rank's parts of
    /// theirs. `entries` are the gradients of one type; there is at least one.
    fn exchange_parts<'a, B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        gradients: &[Option<Float<B>>],
        reduction: &Reduction<'_>,
        entries: &'a [usize],
    ) -> Result<ReceivedParts<'a, B>, CollectiveError> {
        let dtype = reduction.keep[entries[0]].dtype;
        let size = self.members.len();
        let mut lens = Vec::with_capacity(entries.len() * size);
        for &entry in entries {
            let len = self.summed_part(reduction, entry, self.index).len();
            lens.extend((0..size).map(|from| if from == self.index { 0 } else { len }));
        }
        let regions = FlatLayout::new(lens, WorldSize::ONE);
        let buffer = self.part_buffers.buffer::<B>(device, regions.padded_len(), dtype);
        let mut expected = Vec::new();
        for (at, &entry) in entries.iter().enumerate() {
            for from in self.others().filter(|&from| reduction.present[from][entry]) {
                let range = regions.segment(at * size + from);
                expected.push(Expected { from, tag: entry, range });
            }
        }
        let host = |&entry: &usize| Some((entry, B::host(gradients[entry].clone()?)));
        let sent: Vec<_> = entries.iter().filter_map(host).collect();
        let receive = Receive { buffer: &buffer, device, expected: &expected };
        self.transfer(op, receive, sent, |sent, transfers| {
            for (entry, elements) in sent {
                let entry = *entry;
                for to in self.others() {
                    let part = self.summed_part(reduction, entry, to);
                    let part = part.start * dtype.size()..part.end * dtype.size();
                    // SAFETY: `transfer` keeps `sent`, which keeps the elements where they are.
                    unsafe { self.send(transfers, to, entry, &elements[part]) };
                }
            }
        })?;
        Ok(ReceivedParts { entries, regions, buffer })
    }

    /// Returns the mean over this rank's part of the gradient at position `at` of the received
    /// entries, with the entry.
    fn mean_of_part<B: ShardBackend>(
        &self,
        gradients: &[Option<Float<B>>],
        reduction: &Reduction<'_>,
        received: &ReceivedParts<'_, B>,
        at: usize,
    ) -> Option<(usize, RankMean<Float<B>>)> {
        let Reduction { keep, divisor, present, .. } = reduction;
        let (entry, size) = (received.entries[at], self.members.len());
        let (keep, range) = (&keep[entry], self.summed_part(reduction, entry, self.index));
        if range.is_empty() {
            return None;
        }
        let part = |from: usize| match from == self.index {
            true => Some((gradients[entry].clone()?, range.start)),
            false => present[from][entry].then(|| {
                let start = received.regions.segment(at * size + from).start;
                (received.buffer.view(start, &[range.len()]), 0)
            }),
        };
        let parts: Vec<_> = (0..size).filter_map(part).collect();
        let is_final = size == 1 || keep.segment.is_some();
        let shape = if is_final { keep.shape.clone() } else { vec![range.len()] };
        let mean = RankMean { parts, divisor: *divisor, shape: shape.into() };
        (!mean.parts.is_empty()).then_some((entry, mean))
    }

    /// Replaces the sums of this rank's parts of replicated gradients by the full gradients, which
    /// are assembled from the parts of all ranks.
    pub(super) fn assemble_replicated<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        sums: &mut [Option<Float<B>>],
        reduction: &Reduction<'_>,
    ) -> Result<(), CollectiveError> {
        let keep = reduction.keep;
        let is_replicated = |&entry: &usize| {
            keep[entry].segment.is_none()
                && !keep[entry].range.is_empty()
                && reduction.is_summed(entry)
        };
        let entries: Vec<usize> = (0..keep.len()).filter(is_replicated).collect();
        if entries.is_empty() {
            return Ok(());
        }
        let regions =
            FlatLayout::new(entries.iter().map(|&entry| keep[entry].range.len()), WorldSize::ONE);
        let buffer = self.replicated_buffers.buffer::<B>(device, regions.padded_len(), DType::F32);
        let mut expected = Vec::new();
        let (mut own_parts, mut sent) = (Vec::new(), Vec::new());
        // Parts of gradients were tagged with the entry; sums have tags of their own.
        let tag = |entry: usize| keep.len() + entry;
        for (at, &entry) in entries.iter().enumerate() {
            let start = regions.segment(at).start;
            let region = |index| {
                let part = self.summed_part(reduction, entry, index);
                start + part.start..start + part.end
            };
            for from in self.others() {
                expected.push(Expected { from, tag: tag(entry), range: region(from) });
            }
            if let Some(sum) = sums[entry].take() {
                own_parts.push((region(self.index).start, sum.clone()));
                sent.push((entry, B::host(sum)));
            }
        }
        buffer.write_all(own_parts);
        let receive = Receive { buffer: &buffer, device, expected: &expected };
        self.transfer(op, receive, sent, |sent, transfers| {
            for (entry, sum) in sent {
                for to in self.others() {
                    // SAFETY: `transfer` keeps `sent`, which keeps the elements where they are.
                    unsafe { self.send(transfers, to, tag(*entry), sum) };
                }
            }
        })?;
        let part = |(at, &entry): (usize, &usize)| {
            (regions.segment(at).start, Shape::from(keep[entry].shape.clone()))
        };
        let parts = entries.iter().enumerate().map(part).collect();
        let full = buffer.view(0, &[regions.padded_len()]);
        for (&entry, sum) in entries.iter().zip(B::unpack(full, parts, DType::F32, None)) {
            sums[entry] = Some(sum);
        }
        Ok(())
    }
}
