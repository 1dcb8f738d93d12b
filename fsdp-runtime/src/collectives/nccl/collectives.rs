//! The collectives on tensors, over NCCL.

use std::sync::Arc;

use burn::backend::TensorMetadata;

use super::group::NcclGroup;
use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{Float, ShardBackend};
use crate::collectives::op::Op;
use crate::collectives::process_group::{ProcessGroup, ReduceScatter, before};
use crate::collectives::regions::{Announced, BroadcastRoot, MemberRegions, Reduction, announced};
use crate::error::CollectiveError;

impl NcclGroup {
    /// Broadcasts the tensor of each member that has one, and returns one flat tensor of each
    /// member, in rank order. `own` is the calling rank's tensor.
    ///
    /// `announced` is what the members have said of their tensors.
    fn broadcast_each<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        announced: Vec<Announced>,
        own: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let regions = MemberRegions::<B>::new(device, announced, |_| true);
        if let Some(own) = &own {
            regions.buffer.write(regions.region(self.host.index()).start, own.clone());
        }
        if regions.regions().next().is_some() {
            // SAFETY: each member's region lies within the buffer, which only this function uses.
            unsafe {
                self.run::<B>(op, device, &regions.buffer, |collectives, start| {
                    for (member, region) in regions.regions() {
                        let at = start + regions.byte(&region);
                        collectives.broadcast(at, region.len(), member)?;
                    }
                    Ok(())
                })
            }?;
        }
        Ok(regions.into_tensors(self.host.index(), own))
    }
}

impl<B: ShardBackend> ProcessGroup<B> for NcclGroup {
    fn all_gather(
        &self,
        op: &Op,
        device: &B::Device,
        shards: Vec<(usize, Float<B>)>,
        shard_len: usize,
        buffer: &Arc<GatherBuffer<B>>,
    ) -> Result<(), CollectiveError> {
        buffer.write_all(shards);
        self.exchange(op, ())?;
        if shard_len == 0 {
            return Ok(());
        }
        assert!(self.size() * shard_len <= buffer.numel(), "an all-gather fits its buffer");
        let (index, size) = (self.host.index(), buffer.dtype().size());
        // SAFETY: the shards lie within the buffer, as checked above, and the schedule lets nobody
        // read a buffer while it is gathered.
        unsafe {
            self.run::<B>(op, device, buffer, |collectives, at| {
                collectives.all_gather(at, index, shard_len, size)
            })
        }
    }

    fn all_gather_one(
        &self,
        op: &Op,
        device: &B::Device,
        shard: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let all = self.exchange(op, announced::<B>(shard.as_ref()))?;
        self.broadcast_each::<B>(op, device, all.iter().map(|it| **it).collect(), shard)
    }

    fn gather(
        &self,
        op: &Op,
        device: &B::Device,
        to: usize,
        shard: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let all = self.exchange(op, announced::<B>(shard.as_ref()))?;
        let (own, receives) = (self.host.index(), self.host.index() == to);
        // The receiver needs regions for the others' shards; a sender needs one for its own shard.
        let has_region = |member: usize| if receives { member != own } else { member == own };
        let all: Vec<Announced> = all.iter().map(|announced| **announced).collect();
        let is_sent = |(member, announced): (usize, &Announced)| {
            member != to && announced.is_some_and(|(len, _)| len > 0)
        };
        let is_run = all.iter().enumerate().any(is_sent);
        let regions = MemberRegions::<B>::new(device, all, has_region);
        if let Some(shard) = shard.as_ref().filter(|_| !receives) {
            regions.buffer.write(regions.region(own).start, shard.clone());
        }
        if regions.regions().next().is_some() {
            // SAFETY: each region lies within the buffer, which only this function uses.
            unsafe {
                self.run::<B>(op, device, &regions.buffer, |collectives, start| {
                    for (member, region) in regions.regions() {
                        let at = start + regions.byte(&region);
                        match receives {
                            true => collectives.receive(at, region.len(), member)?,
                            false => collectives.send(at, region.len(), to)?,
                        }
                    }
                    Ok(())
                })
            }?;
        } else if is_run {
            self.run_nothing::<B>(op, device)?;
        }
        self.finish()?;
        Ok(if receives { regions.into_tensors(own, shard) } else { Vec::new() })
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
        self.reduce::<B>(op, device, &gradients, &reduction)
    }

    fn broadcast(
        &self,
        op: &Op,
        device: &B::Device,
        tensor: Option<Float<B>>,
    ) -> Result<Float<B>, CollectiveError> {
        let shape = |tensor: &Float<B>| (tensor.shape().to_vec(), tensor.dtype());
        let root = BroadcastRoot::find(&self.exchange(op, tensor.as_ref().map(shape))?);
        let mut tensors = self.broadcast_each::<B>(op, device, root.announced, tensor)?;
        self.finish()?;
        let full = tensors.swap_remove(root.index);
        Ok(B::float_reshape(full.expect("the root passes the tensor"), root.shape))
    }

    fn rotate(
        &self,
        op: &Op,
        device: &B::Device,
        tensor: Float<B>,
    ) -> Result<Float<B>, CollectiveError> {
        self.exchange(op, ())?;
        let (own, members, shape) = (self.host.index(), self.size(), tensor.shape());
        if members == 1 || shape.num_elements() == 0 {
            return Ok(tensor);
        }
        let (from, to) = (before(own, members), (own + 1) % members);
        let of_tensor = announced::<B>(Some(&tensor));
        let all = (0..members).map(|at| of_tensor.filter(|_| at == own || at == from));
        let regions = MemberRegions::<B>::new(device, all, |_| true);
        let (sent, received) = (regions.region(own), regions.region(from));
        regions.buffer.write(sent.start, tensor.clone());
        // SAFETY: both regions lie within the buffer, which only this function uses.
        unsafe {
            self.run::<B>(op, device, &regions.buffer, |collectives, start| {
                collectives.send(start + regions.byte(&sent), sent.len(), to)?;
                collectives.receive(start + regions.byte(&received), received.len(), from)
            })
        }?;
        let mut tensors = regions.into_tensors(own, Some(tensor));
        let received = tensors.swap_remove(from).expect("the member before sends a tensor");
        Ok(B::float_reshape(received, shape))
    }
}
