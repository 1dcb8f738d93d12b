//! The reduction of gradients that are sent in codes.
//!
//! Each rank encodes the part of a gradient that another rank keeps, and sends it there: an all-to-all,
//! as one gather to each rank. The receiver decodes the parts of all ranks, and adds them up in f32 and
//! in rank order. So an element is quantised once, whatever the number of ranks.

use burn::tensor::{DType, Shape};

use crate::backend::codes::{encode, widened_elements, words_data};
use crate::backend::kernels::RankMean;
use crate::backend::{Float, ShardBackend};
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
    let take = |&entry: &usize| (entry, gradients[entry].take().map(elements::<B>));
    let coded: Vec<(usize, Option<Vec<f32>>)> = entries.iter().map(take).collect();
    let plain = ReduceScatter::<B> { gradients, keep, layout, divisor };
    let mut reduced = ProcessGroup::<B>::reduce_scatter(group, op, device, plain)?;
    let own = group.members().iter().position(|member| *member == group.rank());
    let own = own.expect("a rank is a member of its process groups");
    let mut received = Vec::new();
    for (to, rank) in layout_ranks(group).enumerate() {
        let mut words = Vec::new();
        for (entry, gradient) in &coded {
            let range = keep[*entry].segment.map(|segment| layout.shard_of(segment, rank));
            let range = range.unwrap_or(0..0);
            match gradient {
                Some(elements) => words.extend(encode(&elements[range.clone()], &range, codes)),
                // A gradient that this rank does not have counts as zeros.
                None => words.resize(words.len() + codes.stored_len(range.len()), 0),
            }
        }
        let shape = Shape::from([words.len()]);
        let sent =
            (!words.is_empty()).then(|| B::float_from_data(words_data(words, shape), device));
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

/// Returns the elements of a gradient in host memory.
fn elements<B: ShardBackend>(gradient: Float<B>) -> Vec<f32> {
    use burn::backend::TensorMetadata;
    let (dtype, mut elements) = (gradient.dtype(), Vec::new());
    B::with_bytes(gradient, &mut |bytes| {
        elements = widened_elements(bytes, dtype).expect("a gradient has a float dtype");
    });
    elements
}
