//! The reduction of gradients that are sent in codes.
//!
//! Each rank encodes the part of a gradient that another rank keeps, and sends it there: an all-to-all,
//! as one gather to each rank. The receiver decodes the parts of all ranks, and adds them up in f32 and
//! in rank order. So an element is quantised once, whatever the number of ranks.

use burn::tensor::{DType, FloatDType, Shape};
use fsdp_kernels::RankMean;

use crate::backend::{Float, ShardBackend, encoded};
use crate::collectives::group::AnyProcessGroup;
use crate::collectives::{Op, ProcessGroup, Reduce, ReduceScatter};
use crate::error::CollectiveError;
use crate::layout::{Rank, StorageType};

/// Reduces the gradients of a unit like [`ProcessGroup::reduce_scatter`], those of sharded matrices in
/// codes.
pub(super) fn reduce_scatter<B: ShardBackend>(
    group: &AnyProcessGroup,
    op: &Op,
    device: &B::Device,
    request: ReduceScatter<'_, B>,
    codes: StorageType,
) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
    let ReduceScatter { mut gradients, keep, layout, divisor } = request;
    let is_coded = |keep: &Reduce| keep.segment.is_some();
    let present = gradients.iter().zip(keep).map(|(it, keep)| it.is_some() && is_coded(keep));
    let present = group.exchange(op, present.collect::<Vec<bool>>())?;
    let is_sent = |entry: &usize| present.iter().any(|present| present[*entry]);
    let entries: Vec<usize> = (0..keep.len()).filter(is_sent).collect();
    let take = |&entry: &usize| (entry, gradients[entry].take());
    let coded: Vec<(usize, Option<Float<B>>)> = entries.iter().map(take).collect();
    let plain = ReduceScatter::<B> { gradients, keep, layout, divisor };
    let mut reduced = ProcessGroup::<B>::reduce_scatter(group, op, device, plain)?;
    let own = group.members().iter().position(|member| *member == group.rank());
    let own = own.expect("a rank is a member of its process groups");
    let mut received = Vec::new();
    for (to, rank) in layout_ranks(group).enumerate() {
        let encode = |(entry, gradient): &(usize, Option<Float<B>>)| {
            let range = layout.shard_of(keep[*entry].segment?, rank);
            let shape = Shape::from([codes.stored_len(range.len())]);
            Some(match gradient {
                _ if range.is_empty() => return None,
                Some(gradient) => encoded::<B>(gradient.clone(), range, codes, shape, device),
                // A gradient that this rank does not have counts as zeros.
                None => B::float_zeros(shape, device, FloatDType::F32),
            })
        };
        let words: Vec<Float<B>> = coded.iter().filter_map(encode).collect();
        let sent = match words.len() {
            0 | 1 => words.into_iter().next(),
            _ => Some(B::float_cat(words, 0)),
        };
        let parts = ProcessGroup::<B>::gather(group, op, device, to, sent)?;
        if to == own {
            received = parts;
        }
    }
    let (mut means, mut start) = (Vec::new(), 0);
    for &entry in &entries {
        let Reduce { range, shape, .. } = &keep[entry];
        let words = start..start + codes.stored_len(range.len());
        start = words.end;
        if range.is_empty() {
            continue;
        }
        let decode = |part: &Float<B>| {
            let words = B::copy_range(part.clone(), words.clone(), Shape::from([words.len()]));
            (B::decode(words, codes, Shape::from([range.len()]), DType::F32), 0)
        };
        let parts = received.iter().flatten().map(decode).collect();
        means.push(RankMean { parts, divisor, shape: shape.clone().into() });
    }
    let kept = entries.into_iter().filter(|entry| !keep[*entry].range.is_empty());
    for (entry, mean) in kept.zip(B::rank_means(means)) {
        reduced[entry] = Some(mean);
    }
    Ok(reduced)
}

/// Returns the ranks of the layout: the positions of the group's members.
fn layout_ranks(group: &AnyProcessGroup) -> impl Iterator<Item = Rank> {
    let size = crate::layout::WorldSize::new(group.size()).expect("a group has members");
    size.ranks()
}
