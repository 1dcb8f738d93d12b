//! The collectives on tensors, over MPI.

use std::sync::Arc;

use burn::backend::TensorMetadata;

use super::group::MpiGroup;
use super::transfer::{Expected, Receive};
use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{Float, ShardBackend, numel};
use crate::collectives::op::Op;
use crate::collectives::process_group::{ProcessGroup, ReduceScatter, before};
use crate::collectives::regions::{Announced, BroadcastRoot, MemberRegions, Reduction, announced};
use crate::error::CollectiveError;

impl MpiGroup {
    /// Sends `own` to all other members, and returns one flat tensor of each member, in rank order.
    /// With `to`, only the member at that position receives tensors, and the others get none.
    ///
    /// `announced` is what the members have said of their tensors.
    fn exchange_tensors<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        (to, announced): (Option<usize>, Vec<Announced>),
        own: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let receives = to.is_none_or(|to| to == self.index);
        let has_region = |member| receives && member != self.index;
        let regions = MemberRegions::<B>::new(device, announced, has_region);
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
        Ok(if receives { regions.into_tensors(self.index, own) } else { Vec::new() })
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
        let all = self.exchange(op, announced::<B>(shard.as_ref()))?;
        let all = all.iter().map(|announced| **announced).collect();
        self.exchange_tensors::<B>(op, device, (None, all), shard)
    }

    fn gather(
        &self,
        op: &Op,
        device: &B::Device,
        to: usize,
        shard: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let all = self.exchange(op, announced::<B>(shard.as_ref()))?;
        let all = all.iter().map(|announced| **announced).collect();
        self.exchange_tensors::<B>(op, device, (Some(to), all), shard)
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
        let shape = |tensor: &Float<B>| (tensor.shape().to_vec(), tensor.dtype());
        let root = BroadcastRoot::find(&self.exchange(op, tensor.as_ref().map(shape))?);
        let mut tensors = self.exchange_tensors::<B>(op, device, (None, root.announced), tensor)?;
        let full = tensors.swap_remove(root.index);
        Ok(B::float_reshape(full.expect("the root passes the tensor"), root.shape))
    }

    fn rotate(
        &self,
        op: &Op,
        device: &B::Device,
        tensor: Float<B>,
    ) -> Result<Float<B>, CollectiveError> {
        self.rendezvous(op, Vec::new())?;
        let (members, shape) = (self.members.len(), tensor.shape());
        if members == 1 {
            return Ok(tensor);
        }
        let from = before(self.index, members);
        let buffer = Arc::new(GatherBuffer::<B>::new(device, numel::<B>(&tensor), tensor.dtype()));
        let expected = [Expected { from, tag: 0, range: 0..buffer.numel() }];
        let receive = Receive { buffer: &buffer, device, expected: &expected };
        self.transfer(op, receive, B::host(tensor), |sent, transfers| {
            // SAFETY: `transfer` keeps `sent`.
            unsafe { self.send(transfers, (self.index + 1) % members, 0, sent) };
        })?;
        Ok(buffer.view(0, &shape))
    }
}
