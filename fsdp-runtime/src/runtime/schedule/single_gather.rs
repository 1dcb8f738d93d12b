//! The gather of a single parameter, into new memory.

use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Shape};

use super::core::Schedule;
use super::counters::count;
use crate::backend::{ModelBackend, Raw, RawFloat, decoded, numel};
use crate::collectives::{Op, ProcessGroup};
use crate::error::Error;
use crate::module::ParamIndex;

impl<B: ModelBackend> Schedule<B> {
    /// Gathers one parameter, for a `val()` outside of the forward of its unit. Every rank of the
    /// shard group calls it.
    pub(super) fn gather_single(
        &self,
        index: ParamIndex,
        shard: RawFloat<B>,
    ) -> Result<RawFloat<B>, Error> {
        Ok(self.join_parts(index, self.gather_parts(index, shard)?))
    }

    /// Gathers every rank's shard of one parameter, in rank order.
    pub(super) fn gather_parts(
        &self,
        index: ParamIndex,
        shard: RawFloat<B>,
    ) -> Result<Vec<Option<RawFloat<B>>>, Error> {
        let (_, entry) = self.param(index);
        tracing::trace!(target: "fsdp", path = %entry.path, "fsdp::unshard_single");
        count(&self.counters.single_gathers);
        let op = Op::new("all_gather", entry.path.as_str()).of(entry.numel());
        let len = entry.stored_range().len();
        let mine = (len > 0).then(|| Raw::<B>::float_reshape(shard, Shape::from([len])));
        let device = self.device.clone();
        let parts = self.issue(&self.settings.groups.shard, move |group| {
            ProcessGroup::<Raw<B>>::all_gather_one(group, &op, &device, mine)
        });
        Ok(parts.wait()?)
    }

    /// Joins every rank's shard of a parameter, or of a tensor that is sharded like one, to the full
    /// tensor in f32.
    pub(super) fn join_parts(
        &self,
        index: ParamIndex,
        parts: Vec<Option<RawFloat<B>>>,
    ) -> RawFloat<B> {
        let flatten = |part: RawFloat<B>| {
            let numel = numel::<Raw<B>>(&part);
            Raw::<B>::float_reshape(part, Shape::from([numel]))
        };
        let full = Raw::<B>::float_cat(parts.into_iter().flatten().map(flatten).collect(), 0);
        let (_, entry) = self.param(index);
        decoded::<Raw<B>>(full, entry.storage, &entry.shape, DType::F32)
    }
}
