//! The collectives on tensors, over MPI.

use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::tensor::DType;

use super::group::MpiGroup;
use super::transfer::{Expected, Receive};
use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{Float, ShardBackend, cast, numel};
use crate::collectives::op::Op;
use crate::collectives::process_group::{ProcessGroup, ReduceScatter};
use crate::collectives::regions::{BroadcastRoot, MemberRegions, Reduction};
use crate::error::CollectiveError;

impl MpiGroup {
    /// Sends `own` to all other members, and returns one flat tensor of each member, in rank order.
    /// With `to`, only the member at that position receives tensors, and the others get none.
    ///
    /// `lens` are the lengths of the members' tensors in elements; `None` for a member without one.
    fn exchange_tensors<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        (to, lens): (Option<usize>, Vec<Option<usize>>),
        own: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        // Regions of members have f32 elements, which hold those of half precision.
        let half = own
            .as_ref()
            .map(TensorMetadata::dtype)
            .filter(|it| [DType::BF16, DType::F16].contains(it));
        let own = own.map(|own| if half.is_some() { cast::<B>(own, DType::F32) } else { own });
        let receives = to.is_none_or(|to| to == self.index);
        let has_region = |member| receives && member != self.index;
        let regions = MemberRegions::<B>::new(device, lens, has_region);
        let expected = |(from, range)| Expected { from, tag: 0, range };
        let expected: Vec<_> = regions.regions().map(expected).collect();
        let receive = Receive { buffer: &regions.buffer, device, expected: &expected };
        let sent = own.clone().map(B::host);
        self.transfer(op, receive, sent, |sent, transfers| {
            for member in self.others().filter(|member| to.is_none_or(|to| to == *member)) {
                if let Some(sent) = sent {
                    // SAFETY: `transfer` keeps `sent`.
                    unsafe { self.send(transfers, member, 0, sent) };
                }
            }
        })?;
        let tensors = if receives { regions.into_tensors(self.index, own) } else { Vec::new() };
        Ok(match half {
            Some(dtype) => {
                let narrow = |tensor: Option<_>| tensor.map(|tensor| cast::<B>(tensor, dtype));
                tensors.into_iter().map(narrow).collect()
            }
            None => tensors,
        })
    }
}

impl<B: ShardBackend> ProcessGroup<B> for MpiGroup {
    fn all_gather(
        &self,
        op: &Op,
        device: &B::Device,
        shards: Vec<(usize, Float<B>)>,
        shard_len: usize,
        buffer: &Arc<GatherBuffer<B>>,
    ) -> Result<(), CollectiveError> {
        buffer.write_all(shards);
        self.rendezvous(op, Vec::new())?;
        let shard = |index: usize| index * shard_len..(index + 1) * shard_len;
        let expected: Vec<_> =
            self.others().map(|from| Expected { from, tag: 0, range: shard(from) }).collect();
        let receive = Receive { buffer, device, expected: &expected };
        let own = B::host(buffer.view(shard(self.index).start, &[shard_len]));
        self.transfer(op, receive, own, |own, transfers| {
            for to in self.others() {
                // SAFETY: `transfer` keeps `own`: a view of this rank's part of the buffer, or a
                // copy.
                unsafe { self.send(transfers, to, 0, own) };
            }
        })?;
        Ok(())
    }

    fn all_gather_one(
        &self,
        op: &Op,
        device: &B::Device,
        shard: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let lens = self.exchange(op, shard.as_ref().map(numel::<B>))?;
        let lens = lens.iter().map(|len| **len).collect();
        self.exchange_tensors::<B>(op, device, (None, lens), shard)
    }

    fn gather(
        &self,
        op: &Op,
        device: &B::Device,
        to: usize,
        shard: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let lens = self.exchange(op, shard.as_ref().map(numel::<B>))?;
        let lens = lens.iter().map(|len| **len).collect();
        self.exchange_tensors::<B>(op, device, (Some(to), lens), shard)
    }

    fn reduce_scatter(
        &self,
        op: &Op,
        device: &B::Device,
        request: ReduceScatter<'_, B>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let ReduceScatter { gradients, keep, layout, divisor } = request;
        let present: Vec<bool> = gradients.iter().map(Option::is_some).collect();
        let present = self.exchange(op, present)?;
        let reduction = Reduction { keep, layout, divisor, present };
        let mut sums = self.sum_parts::<B>(op, device, &gradients, &reduction)?;
        drop(gradients);
        if self.members.len() > 1 {
            self.assemble_replicated::<B>(op, device, &mut sums, &reduction)?;
        }
        Ok(sums)
    }

    fn broadcast(
        &self,
        op: &Op,
        device: &B::Device,
        tensor: Option<Float<B>>,
    ) -> Result<Float<B>, CollectiveError> {
        let shapes = self.exchange(op, tensor.as_ref().map(|tensor| tensor.shape().to_vec()))?;
        let root = BroadcastRoot::find(&shapes);
        let mut tensors = self.exchange_tensors::<B>(op, device, (None, root.lens), tensor)?;
        let full = tensors.swap_remove(root.index);
        Ok(B::float_reshape(full.expect("the root passes the tensor"), root.shape))
    }
}
