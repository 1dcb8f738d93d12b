//! The collectives on tensors, over NCCL.

use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::tensor::DType;

use super::group::NcclGroup;
use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{Float, ShardBackend, numel};
use crate::collectives::op::Op;
use crate::collectives::process_group::{ProcessGroup, ReduceScatter};
use crate::collectives::regions::{BroadcastRoot, MemberRegions, Reduction};
use crate::error::CollectiveError;

impl NcclGroup {
    /// Broadcasts the tensor of each member that has one, and returns one flat tensor of each
    /// member, in rank order. `own` is the calling rank's tensor.
    ///
    /// `lens` are the lengths of the members' tensors in elements; `None` for a member without one.
    fn broadcast_each<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        lens: Vec<Option<usize>>,
        own: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let regions = MemberRegions::<B>::new(device, lens, |_| true);
        if let Some(own) = &own {
            regions.buffer.write(regions.region(self.host.index()).start, own.clone());
        }
        if regions.regions().next().is_some() {
            // SAFETY: each member's region lies within the buffer, which only this function uses.
            unsafe {
                self.run::<B>(op, device, &regions.buffer, |collectives, start| {
                    for (member, region) in regions.regions() {
                        let at = start + (region.start * DType::F32.size()) as u64;
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
        let lens = self.exchange(op, shard.as_ref().map(numel::<B>))?;
        self.broadcast_each::<B>(op, device, lens.iter().map(|len| **len).collect(), shard)
    }

    fn gather(
        &self,
        op: &Op,
        device: &B::Device,
        to: usize,
        shard: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let lens = self.exchange(op, shard.as_ref().map(numel::<B>))?;
        let (own, receives) = (self.host.index(), self.host.index() == to);
        // The receiver needs regions for the others' shards; a sender needs one for its own shard.
        let has_region = |member: usize| if receives { member != own } else { member == own };
        let lens = lens.iter().map(|len| **len).collect();
        let regions = MemberRegions::<B>::new(device, lens, has_region);
        if let Some(shard) = shard.as_ref().filter(|_| !receives) {
            regions.buffer.write(regions.region(own).start, shard.clone());
        }
        if regions.regions().next().is_some() {
            // SAFETY: each region lies within the buffer, which only this function uses.
            unsafe {
                self.run::<B>(op, device, &regions.buffer, |collectives, start| {
                    for (member, region) in regions.regions() {
                        let at = start + (region.start * DType::F32.size()) as u64;
                        match receives {
                            true => collectives.receive(at, region.len(), member)?,
                            false => collectives.send(at, region.len(), to)?,
                        }
                    }
                    Ok(())
                })
            }?;
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
        let shapes = self.exchange(op, tensor.as_ref().map(|tensor| tensor.shape().to_vec()))?;
        let root = BroadcastRoot::find(&shapes);
        let mut tensors = self.broadcast_each::<B>(op, device, root.lens, tensor)?;
        self.finish()?;
        let full = tensors.swap_remove(root.index);
        Ok(B::float_reshape(full.expect("the root passes the tensor"), root.shape))
    }
}
